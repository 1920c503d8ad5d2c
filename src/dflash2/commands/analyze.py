"""`dflash2 analyze`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from dflash2.commands.measuring import chosen_prompts, llama_options, pair_options, prompt_options, save
from dflash2.commands.terminal import FILE, console, counting

if TYPE_CHECKING:
    from dflash2.evidence import Analysis, Position

_SHOWN_RECALL = (1, 2, 4, 8, 16)


@click.command()
@click.argument("target", type=FILE)
@click.argument("drafter", type=FILE)
@prompt_options
@click.option("-n", "--tokens", type=click.IntRange(min=1), default=100, show_default=True, help="Per text.")
@click.option("--stride", type=click.IntRange(min=1), default=1, show_default=True, help="Tokens between two drafts.")
@click.option("--lattices", type=click.IntRange(min=0), default=0, show_default=True, help="Cycles kept in --json.")
@pair_options
@click.option("--json", "output", type=FILE, help="Also write the result as JSON.")
def analyze(target: Path, drafter: Path, **options: Any) -> None:
    """Why does the pair TARGET, DRAFTER (GGUF) accept as much as it does? Recall, the selector's part, calibration."""
    from dflash2 import evidence

    prompts = chosen_prompts(options)
    with evidence.opened(target, drafter, llama_options(target, options)) as engine, counting("drafting") as tick:
        found = evidence.analyze(
            engine,
            prompts,
            n_tokens=options["tokens"],
            stride=options["stride"],
            chat=options["chat"],
            n_lattices=options["lattices"],
            progress=tick,
        )
        about = engine.about()
    _show(found)
    models = {"target": target, "drafter": drafter}
    save("analyze", options, engine=about, models=models, rows=_rows(found), summary=_summary(found))


def _rows(found: Analysis) -> tuple[dict[str, Any], ...]:
    positions = ({"kind": "position", **asdict(one)} for one in found.positions)
    bins = ({"kind": "bin", **asdict(one)} for one in found.calibration.bins)
    return (*positions, *bins, *({"kind": "lattice", **asdict(one)} for one in found.lattices))


def _summary(found: Analysis) -> dict[str, Any]:
    return {
        "texts": found.n_texts,
        "anchors": found.n_anchors,
        "accepted_length": asdict(found.everywhere),
        "accepted_length_in_cycles": None if found.in_cycles is None else asdict(found.in_cycles),
        "calibration_error": found.calibration.error,
        "left_out": list(found.left_out),
    }


def _show(found: Analysis) -> None:
    console.print(_lengths(found), _recall(found), _selector(found), _calibration(found))
    console.print(f"Expected calibration error of q: {found.calibration.error:.3f}.")
    if found.left_out:
        console.print(f"left out, too long or too short: {', '.join(found.left_out)}", markup=False)


def _lengths(found: Analysis) -> Table:
    most = len(found.positions[0].recall)
    table = Table(
        "",
        "top-1",
        "path",
        f"oracle over {most}",
        title=f"Accepted length ({found.n_anchors} drafts)",
        title_justify="left",
    )
    for name, lengths in (("from every draft", found.everywhere), ("in cycles", found.in_cycles)):
        if lengths is not None:
            table.add_row(name, *(f"{length:.2f}" for length in asdict(lengths).values()))
    return table


def _recall(found: Analysis) -> Table:
    shown = [k for k in _SHOWN_RECALL if k <= len(found.positions[0].recall)]
    table = Table(
        "position", *(f"@{k}" for k in shown), title="Recall, the text before the block is right", title_justify="left"
    )
    for one in found.positions:
        table.add_row(str(one.position), *(f"{one.recall[k - 1]:.1%}" for k in shown))
    return table


def _selector(found: Analysis) -> Table:
    title = "Acceptance, where the path is right so far"
    table = Table("position", "n", "top-1 right", "path right", "fixed", "spoiled", title=title, title_justify="left")
    for one in found.positions:
        table.add_row(str(one.position), str(one.n), *_shares(one))
    return table


def _shares(one: Position) -> list[str]:
    counts = (one.top_1_right, one.path_right, one.fixed, one.spoiled)
    return [f"{count / one.n:.1%}" if one.n else "-" for count in counts]


def _calibration(found: Analysis) -> Table:
    title = f"Calibration of q ({found.calibration.n} tokens)"
    table = Table("q", "n", "mean q", "right", title=title, title_justify="left")
    for one in found.calibration.bins:
        table.add_row(f"{one.low:.1f}-{one.high:.1f}", str(one.n), f"{one.mean_q:.3f}", f"{one.right:.3f}")
    return table
