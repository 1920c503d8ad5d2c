"""`dflash2 report`."""

from __future__ import annotations

from pathlib import Path

import click

from dflash2.commands.terminal import FILE, console
from dflash2.whole_file import replacing


@click.command()
@click.argument("results", metavar="RESULT.json...", type=FILE, nargs=-1, required=True)
@click.option("-o", "--output", type=FILE, default="report.html", show_default=True, help="The page.")
@click.option("--png", type=FILE, help="Also write the pictures as PNG files into this folder (extra `report`).")
def report(results: tuple[Path, ...], output: Path, png: Path | None) -> None:
    """One HTML page of saved results of bench, analyze, verify and parity: tables, pictures, conditions."""
    from dflash2 import evidence

    sections = [evidence.read_section(path) for path in results]
    with replacing(output) as place:
        place.write_text(evidence.html(sections), encoding="utf-8")
    if png is not None:
        evidence.write_pngs(sections, png)
    console.print(f"wrote {output}", markup=False, soft_wrap=True)
