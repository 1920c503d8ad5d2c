"""`dflash2 convert` (also `dflash2-convert`) and `dflash2 inspect`."""

from __future__ import annotations

from pathlib import Path

import click
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
from rich.table import Table

from dflash2 import converter
from dflash2.commands.terminal import FILE, HELP, console, errors
from dflash2.converter import OUT_TYPES, Overrides


def _pairs(_context: click.Context, _option: click.Parameter, given: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """PATTERN=TYPE as pairs; a usage error if there is no equals sign."""
    pairs = []
    for text in given:
        pattern, _, type_name = text.rpartition("=")
        if not pattern:
            raise click.BadParameter(f"{text!r} is not PATTERN=TYPE, as 'fc=q8_0'.")
        pairs.append((pattern, type_name))
    return tuple(pairs)


@click.command(context_settings=HELP)
@click.argument("drafter", type=FILE)
@click.option("--target", type=FILE, required=True, help="GGUF of the model the drafter belongs to: its tokenizer.")
@click.option("-o", "--output", type=FILE, required=True, help="GGUF file to write.")
@click.option(
    "--outtype",
    metavar=f"[{'|'.join(OUT_TYPES)}]",
    default="bf16",
    show_default=True,
    help="Type of the matrices; all but f32, f16, bf16 and q8_0 go through llama.cpp's quantiser.",
)
@click.option(
    "--tensor-type",
    "tensor_types",
    metavar="PATTERN=TYPE",
    callback=_pairs,
    multiple=True,
    help="Type of the matrices in whose GGUF name PATTERN is found, as 'fc=q8_0' or 'ffn_(up|gate)=q4_k'; repeatable.",
)
@click.option("--block-size", type=click.IntRange(2, 1024), help="Tokens per block, where the checkpoint names none.")
@click.option("--mask-token-id", type=click.IntRange(min=0), help="The drafter's mask token, likewise.")
@click.option(
    "--sliding-window",
    type=click.Choice(["on", "off"]),
    help="Keep or drop the window of sliding layers, against 'use_sliding_window' of config.json.",
)
def convert(
    drafter: Path,
    target: Path,
    output: Path,
    outtype: str,
    tensor_types: tuple[tuple[str, str], ...],
    block_size: int | None,
    mask_token_id: int | None,
    sliding_window: str | None,
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
            tensor_types=tensor_types,
            overrides=Overrides(
                block_size=block_size,
                mask_token_id=mask_token_id,
                sliding_window=None if sliding_window is None else sliding_window == "on",
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
