"""`dflash2 parity`."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from dflash2 import converter
from dflash2.commands.measuring import chosen_prompts, llama_options, pair_options, prompt_options, save
from dflash2.commands.terminal import FILE, cell, console, errors

if TYPE_CHECKING:
    from dflash2.evidence import Parity, StageResult

_BATCH = 64


@click.command()
@click.argument("target", type=FILE)
@click.argument("drafter", type=FILE)
@click.option("--checkpoint", type=FILE, help="The drafter's Hugging Face folder: also compare its weights.")
@prompt_options
@click.option("--blocks", type=click.IntRange(min=1), default=4, show_default=True, help="Drafted along each prompt.")
@click.option("--flash-attention", is_flag=True, help="Compare llama.cpp's flash attention.")
@pair_options
@click.option("--json", "output", type=FILE, help="Also write the result as JSON.")
def parity(target: Path, drafter: Path, checkpoint: Path | None, **options: Any) -> None:
    """Which stage of DRAFTER does llama.cpp compute differently from PyTorch? Exit status 1 if one drifts.

    Needs the extra `reference`. Keys and values are kept in F32 unless --cache-type says otherwise.
    """
    from dflash2 import evidence

    if options["limit"] is None:
        options["limit"] = 1
    given = llama_options(target, options)
    with evidence.opened(target, drafter, given) as engine:
        about = engine.about()
        texts = [engine.tokens_of(prompt, chat=options["chat"]) for prompt in chosen_prompts(options)]
    outcome = _compare(target, drafter, checkpoint, texts, given, options)
    _show(outcome)
    rows = ({"kind": "stage", **asdict(stage), "drifts": stage.drifts} for stage in outcome.stages)
    summary = {
        "passed": outcome.first is None,
        "first": None if outcome.first is None else str(outcome.first),
        "blocks": outcome.n_blocks,
        "equal_proposals": outcome.n_equal,
    }
    options["checkpoint"] = None if checkpoint is None else checkpoint.name
    save("parity", options, engine=about, models={"target": target, "drafter": drafter}, rows=rows, summary=summary)
    if outcome.first is not None:
        sys.exit(1)


def _compare(
    target: Path,
    drafter: Path,
    checkpoint: Path | None,
    texts: Sequence[Sequence[int]],
    given: dict[str, Any],
    options: dict[str, Any],
) -> Parity:
    """`given`: what the pair was opened with for its `texts`."""
    from gguf.constants import GGMLQuantizationType

    from dflash2 import evidence
    from dflash2.native import ContextOptions, Placement

    threads = given.get("n_threads") or max(1, (os.cpu_count() or 2) // 2)
    context = ContextOptions(
        n_ctx=given["n_ctx"],
        n_batch=_BATCH,
        n_ubatch=_BATCH,
        n_threads=threads,
        n_threads_batch=threads,
        flash_attn_type=int(options["flash_attention"]),
        type_k=given.get("type_k", GGMLQuantizationType.F32),
        type_v=given.get("type_v", GGMLQuantizationType.F32),
    )
    with tempfile.TemporaryDirectory() as folder:
        converted = None
        if checkpoint is not None:
            converted = Path(folder) / "checkpoint-f32.gguf"
            with errors.status("reading the checkpoint"):
                converter.convert(checkpoint, target, converted, outtype="f32")
        return evidence.parity(
            target,
            drafter,
            [text[: given["n_ctx"] - _BATCH] for text in texts],
            checkpoint=converted,
            n_blocks=options["blocks"],
            options=context,
            placement=Placement(n_gpu_layers=options["gpu_layers"]),
        )


def _show(outcome: Parity) -> None:
    with_weights = any(stage.weights is not None for stage in outcome.stages)
    table = Table("stage", "layer", "error", "explained", *(("weights", "explained") if with_weights else ()), "")
    for stage in outcome.stages:
        numbers = [f"{stage.error:.1e}", f"{stage.limit:.1e}"]
        if with_weights:
            numbers += ["-" if one is None else f"{one:.1e}" for one in (stage.weights, stage.weights_limit)]
        table.add_row(
            cell(stage.name),
            "" if stage.layer is None else str(stage.layer),
            *numbers,
            _verdict(stage),
        )
    console.print(table)
    console.print(f"{outcome.n_equal} of {outcome.n_blocks} proposals are those of the reference alone.")
    if outcome.first is None:
        console.print("No stage drifts.")
    elif outcome.first.engine_drifts:
        console.print(
            f"The first stage that drifts: {outcome.first}. llama.cpp computes something else than the file says.",
            style="red",
        )
    else:
        console.print(
            f"The first stage that drifts: {outcome.first}. The file says something else than the checkpoint.",
            style="red",
        )


def _verdict(stage: StageResult) -> str:
    if stage.engine_drifts:
        return "engine drifts"
    return "weights drift" if stage.weights_drift else ""
