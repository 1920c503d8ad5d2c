"""The commands `dflash2` and `dflash2-convert`: thin, each calls the library and prints what it returns."""

from __future__ import annotations

import contextlib
import io
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from gguf.constants import GGMLQuantizationType
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from dflash2 import __version__, converter
from dflash2.converter import OUT_TYPES, OutType
from dflash2.demo import demo_pair
from dflash2.errors import Dflash2Error
from dflash2.gguf_info import read_gguf_info

if TYPE_CHECKING:
    from dflash2.evidence import Bench
    from dflash2.runtime import DraftStats

FILE = click.Path(path_type=Path)
THREADS = click.IntRange(min=1, max=1024)
console = Console(highlight=False)
errors = Console(stderr=True, highlight=False)


def _call(command: click.Command) -> None:
    """Run a command; an error of ours is shown as its one sentence and ends with status 1."""
    debug = "--debug" in sys.argv
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character is no reason to fail
    try:
        command.main(standalone_mode=False)
    except Dflash2Error as error:
        if debug:
            raise
        errors.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        sys.exit(1)
    except BrokenPipeError:
        os._exit(141)  # as a program ended by SIGPIPE: the reader has seen enough
    except OSError as error:
        if debug:
            raise
        with contextlib.suppress(OSError):
            errors.print(f"error: cannot write the output: {error.strerror}", style="red", markup=False)
        os._exit(1)  # the streams cannot be flushed any more
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        errors.print("aborted")
        sys.exit(130)


HELP = {"help_option_names": ["-h", "--help"]}


@click.group(context_settings=HELP)
@click.version_option(__version__, prog_name="dflash2")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def cli(debug: bool) -> None:
    """DFlash 2 speculative decoding for llama.cpp, llama-cpp-python and Ollama."""


@cli.command(context_settings=HELP)
@click.argument("drafter", type=FILE)
@click.option("--target", type=FILE, required=True, help="GGUF of the model the drafter belongs to: its tokenizer.")
@click.option("-o", "--output", type=FILE, required=True, help="GGUF file to write.")
@click.option(
    "--outtype", type=click.Choice(OUT_TYPES), default="bf16", show_default=True, help="Type of the matrices."
)
def convert(drafter: Path, target: Path, output: Path, outtype: OutType) -> None:
    """Convert the drafter checkpoint in the folder DRAFTER (config.json, safetensors) to GGUF."""
    columns = (TextColumn("writing"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task("writing", total=None)
        done = converter.convert(
            drafter,
            target,
            output,
            outtype=outtype,
            progress=lambda written, total: bar.update(task, completed=written, total=total),
        )
    console.print(
        f"{done.output}: {done.n_tensors} tensors, {done.n_parameters / 1e6:.1f} M parameters, "
        f"{done.n_bytes / 1e6:.1f} MB, {done.outtype}",
        markup=False,
        soft_wrap=True,
    )
    for note in done.notes:
        errors.print(f"note: {note}", style="yellow", markup=False, soft_wrap=True)


@cli.command()
@click.argument("file", type=FILE)
@click.option("--tensors", is_flag=True, help="List every tensor too.")
def inspect(file: Path, tensors: bool) -> None:
    """Say what the GGUF file FILE is: a drafter of which kind, for which taps, or a target."""
    found = converter.inspect(file)
    table = Table("fact", "value")
    for label, value in found.rows():
        table.add_row(label, value)
    console.print(table)
    if tensors:
        listing = Table("tensor", "shape (ggml order)", "type", "bytes")
        for tensor in found.tensors:
            shape = " x ".join(map(str, tensor.shape))
            listing.add_row(tensor.name, shape, tensor.type_name, f"{tensor.n_bytes:,}")
        console.print(listing)


@cli.command()
@click.argument("target", type=FILE)
@click.argument("drafter", type=FILE)
@click.argument("prompt")
@click.option("-n", "--max-tokens", type=click.IntRange(min=1), default=256, show_default=True)
@click.option(
    "-c",
    "--ctx-size",
    type=click.IntRange(min=1, max=2**31 - 1),
    default=None,
    help="Tokens of context. Default: what the target was trained with, 4096 at most.",
)
@click.option("-t", "--threads", type=THREADS, default=None, help="Default: half the cores.")
@click.option(
    "-ngl",
    "--gpu-layers",
    type=click.IntRange(min=-1, max=10_000),
    default=0,
    show_default=True,
    help="Layers on the GPU, -1 for all.",
)
@click.option("--depth", type=click.IntRange(min=0), default=None, help="Draft tokens verified per cycle; 0: none.")
@click.option("--temp", type=click.FloatRange(min=0), default=0.0, show_default=True)
@click.option("--seed", type=click.IntRange(min=0, max=2**32 - 1), default=None)
def run(
    target: Path,
    drafter: Path,
    prompt: str,
    max_tokens: int,
    ctx_size: int | None,
    threads: int | None,
    gpu_layers: int,
    depth: int | None,
    temp: float,
    seed: int | None,
) -> None:
    """Continue PROMPT with the GGUF pair TARGET and DRAFTER, streaming, and print what drafting did."""
    from dflash2.runtime import DFlashLlama

    if not prompt:
        raise click.UsageError("PROMPT is empty; give a text to continue.")
    if not math.isfinite(temp):
        raise click.UsageError(f"--temp is {temp}; give a finite number.")
    trained = read_gguf_info(target)
    ctx_size = ctx_size or min(4096, trained.integer(trained.own("context_length")) or 4096)
    llm = DFlashLlama(
        target, drafter, depth=depth, n_ctx=ctx_size, n_threads=threads, n_gpu_layers=gpu_layers, verbose=False
    )
    with contextlib.closing(llm):
        n_prompt = len(llm.tokenize(prompt.encode()))
        if n_prompt >= llm.n_ctx():
            raise Dflash2Error(f"the prompt has {n_prompt} tokens, the context {llm.n_ctx()}; raise it with -c.")
        begin = time.perf_counter()
        for chunk in llm.create_completion(prompt, max_tokens=max_tokens, temperature=temp, seed=seed, stream=True):
            click.echo(chunk["choices"][0]["text"], nl=False)
        click.echo()
        errors.print(_stats_line(llm.stats, time.perf_counter() - begin), markup=False, soft_wrap=True)


def _stats_line(stats: DraftStats, seconds: float) -> str:
    stages = ", ".join(f"{name} {1000 * s / max(stats.cycles, 1):.2f}" for name, s in stats.seconds.items())
    return (
        f"{stats.emitted} tokens in {seconds:.2f} s ({stats.emitted / seconds:.1f} tokens/s), {stats.cycles} cycles, "
        f"{stats.accepted} of {stats.drafted} drafted tokens accepted, accepted length {stats.accepted_length:.2f}; "
        f"ms per cycle: {stages}"
    )


@cli.command()
@click.option("-t", "--threads", type=THREADS, default=None, help="Default: every core.")
@click.option("--prompts", "n_prompts", type=click.IntRange(min=1), default=8, show_default=True)
@click.option("--tokens", "n_tokens", type=click.IntRange(min=16), default=200, show_default=True)
def demo(threads: int | None, n_prompts: int, n_tokens: int) -> None:
    """Convert the shipped drafter, then generate with and without drafting: equal tokens, L, c(w) and tokens/s."""
    from dflash2 import evidence

    pair = demo_pair()
    threads = threads or os.cpu_count()
    # With an F16 cache, llama.cpp's CPU attention splits one row's keys among threads but not several rows': near-ties.
    cache = GGMLQuantizationType.Q8_0
    options = {"n_ctx": 512, "n_threads": threads, "n_threads_batch": threads, "type_k": cache, "type_v": cache}
    with tempfile.TemporaryDirectory() as folder:
        drafter = Path(folder) / "drafter.gguf"
        done = converter.convert(pair.drafter, pair.target, drafter)
        console.print(
            f"converted the demo drafter: {done.n_tensors} tensors, {done.n_bytes / 1e6:.1f} MB {done.outtype} GGUF"
        )
        small = _bench_with_progress(
            "the target as it is", pair.target, drafter, pair.prompts, n_prompts, n_tokens, options
        )
        with errors.status("making the cost-scaled target (once, about 300 MB in the cache)"):
            scaled = evidence.scaled_target(pair.target)
        large = _bench_with_progress(
            "the cost-scaled target", scaled, drafter, pair.prompts, n_prompts, n_tokens, options
        )
    table = Table("", "as it is (6 M, Q8_0)", "cost-scaled (150 M, F16)")
    for label, value in _DEMO_ROWS:
        table.add_row(label, value(small), value(large))
    console.print(table)
    console.print(_DEMO_EXPLANATION, soft_wrap=False)
    if small.n_equal < len(small.runs):
        raise Dflash2Error("the output changed with drafting on; please report this with the output of this command.")


_DEMO_ROWS: tuple[tuple[str, Callable[[Bench], str]], ...] = (
    ("token ids equal", lambda b: f"{b.n_equal} of {len(b.runs)} prompts"),
    ("L, accepted length", lambda b: f"{b.accepted_length:.2f}"),
    ("c(w), cycle / token", lambda b: f"{b.cycle_cost:.2f}"),
    ("tokens/s without drafting", lambda b: f"{b.plain_tokens_per_second:.1f}"),
    ("tokens/s with drafting", lambda b: f"{b.drafted_tokens_per_second:.1f}"),
    ("speedup, L / c(w)", lambda b: f"{b.speedup:.2f}x"),
)
_DEMO_EXPLANATION = (
    "L is the number of tokens per verify pass. c(w) is the time of one cycle (draft, verify and the rest) over the "
    "time of one token without drafting; their ratio is the speedup. The demo target is so small that a CPU is bound "
    "by arithmetic: checking eight tokens costs several times one token, and drafting loses. A real model is bound by "
    "reading its weights. The cost-scaled target imitates that: it computes the same function, its feed-forward "
    "layers widened to 150 M parameters with rows whose output columns are zero. In F16 the logits of one token "
    "depend a little on how many are evaluated together, so that near-ties may fall the other way there."
)


def _bench_with_progress(
    what: str,
    target: Path,
    drafter: Path,
    prompts: Sequence[str],
    n_prompts: int,
    n_tokens: int,
    options: Mapping[str, Any],
) -> Bench:
    from dflash2 import evidence

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task(f"generating with {what}", total=n_prompts)
        return evidence.bench(
            target,
            drafter,
            prompts[:n_prompts],
            n_tokens=n_tokens,
            progress=lambda done, _total: bar.update(task, completed=done),
            **options,
        )


def main() -> None:
    """Entry point of `dflash2`."""
    _call(cli)


def convert_main() -> None:
    """Entry point of `dflash2-convert`."""
    _call(convert)
