"""`dflash2 convert` (also `dflash2-convert`) and `dflash2 inspect`."""

from __future__ import annotations

from pathlib import Path

import click
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
from rich.table import Table

from dflash2 import converter
from dflash2.commands.terminal import FILE, HELP, console, errors
from dflash2.converter import OUT_TYPES, OutType, Overrides, TapIds


@click.command(context_settings=HELP)
@click.argument("drafter", type=FILE)
@click.option("--target", type=FILE, required=True, help="GGUF of the model the drafter belongs to: its tokenizer.")
@click.option("-o", "--output", type=FILE, required=True, help="GGUF file to write.")
@click.option(
    "--outtype", type=click.Choice(OUT_TYPES), default="bf16", show_default=True, help="Type of the matrices."
)
@click.option("--block-size", type=click.IntRange(2, 1024), help="Tokens per block, where the checkpoint names none.")
@click.option("--mask-token-id", type=click.IntRange(min=0), help="The drafter's mask token, likewise.")
@click.option(
    "--sliding-window",
    type=click.Choice(["on", "off"]),
    help="Keep or drop the window of sliding layers, against 'use_sliding_window' of config.json.",
)
@click.option(
    "--tap-ids",
    type=click.Choice(["outputs", "inputs"]),
    help="Whether the checkpoint's tap ids name layers by their output or by their input, where it may be either.",
)
@click.option(
    "--rope-theta",
    type=click.FloatRange(min=0, min_open=True),
    help="Base of the drafter's rotary embedding, where the checkpoint names two.",
)
def convert(
    drafter: Path,
    target: Path,
    output: Path,
    outtype: OutType,
    block_size: int | None,
    mask_token_id: int | None,
    sliding_window: str | None,
    tap_ids: TapIds | None,
    rope_theta: float | None,
) -> None:
    """Convert the drafter checkpoint in the folder DRAFTER (config.json, safetensors) to GGUF."""
    columns = (TextColumn("writing"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task("writing", total=None)
        done = converter.convert(
            drafter,
            target,
            output,
            outtype=outtype,
            overrides=Overrides(
                block_size=block_size,
                mask_token_id=mask_token_id,
                sliding_window=None if sliding_window is None else sliding_window == "on",
                tap_ids=tap_ids,
                rope_theta=rope_theta,
            ),
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


@click.command()
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
