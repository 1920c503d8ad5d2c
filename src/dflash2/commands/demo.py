"""`dflash2 demo`: the main job on the shipped pair."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from gguf.constants import GGMLQuantizationType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from dflash2 import converter
from dflash2.commands.terminal import THREADS, console, errors
from dflash2.demo import demo_pair
from dflash2.errors import Dflash2Error

if TYPE_CHECKING:
    from dflash2.evidence import Bench


@click.command()
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
