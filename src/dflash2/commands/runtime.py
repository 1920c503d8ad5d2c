"""`dflash2 run`."""

from __future__ import annotations

import contextlib
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dflash2.commands.terminal import FILE, THREADS, errors
from dflash2.errors import Dflash2Error
from dflash2.gguf_info import read_gguf_info

if TYPE_CHECKING:
    from dflash2.runtime import DraftStats


@click.command()
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
@click.option(
    "--depth",
    type=click.IntRange(min=0),
    default=None,
    help="Draft tokens verified per cycle, 0 for none. Default: what is fastest here, found while generating.",
)
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
        target,
        drafter,
        depth="auto" if depth is None else depth,
        n_ctx=ctx_size,
        n_threads=threads,
        n_gpu_layers=gpu_layers,
        verbose=False,
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
