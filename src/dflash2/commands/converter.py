"""`dflash2 convert` (also `dflash2-convert`), `inspect`, `check`, `upgrade` and `list`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click
from rich.table import Table

from dflash2 import converter
from dflash2.commands.terminal import FILE, HELP, cell, console
from dflash2.converter import Change, Finding


@click.command(context_settings=HELP)
@click.argument("path")
@click.option("--tensors", is_flag=True, help="List every tensor too.")
@click.option("--json", "as_json", is_flag=True, help="Facts as JSON (docs/inspect.md has the schema).")
def inspect(path: str, tensors: bool, as_json: bool) -> None:
    """Say what PATH is: a drafter or a target (GGUF file), or a checkpoint folder and whether it can be converted."""
    found = converter.inspect(path)
    if as_json:
        click.echo(json.dumps(found.to_dict(tensors=tensors), indent=2))
        return
    table = Table("fact", "value")
    for label, value in found.rows():
        table.add_row(label, cell(value))
    console.print(table)
    if tensors:
        listing = Table("tensor", "shape (ggml order)", "type", "bytes")
        for tensor in found.tensors:
            shape = " x ".join(map(str, tensor.shape))
            listing.add_row(cell(tensor.name), shape, tensor.type_name, f"{tensor.n_bytes:,}")
        console.print(listing)


@click.command(context_settings=HELP)
@click.argument("drafter", type=FILE)
@click.argument("target", type=FILE)
@click.option("--json", "as_json", is_flag=True, help="All checks as JSON (docs/inspect.md has the schema).")
@click.option("--all", "show_all", is_flag=True, help="Show the checks that passed too.")
@click.option("--strict", is_flag=True, help="Fail on warnings too.")
def check(drafter: Path, target: Path, as_json: bool, show_all: bool, strict: bool) -> None:
    """Check whether DRAFTER (GGUF or checkpoint folder) and TARGET (GGUF or folder) fit each other and run here.

    The exit status is 1 if something keeps the pair from working. No weights are read.
    """
    report = converter.check(drafter, target)
    if as_json:
        click.echo(json.dumps(report.to_dict(), indent=2))
    else:
        for finding in report.findings if show_all else report.problems:
            console.print(finding_line(finding), style=_STYLES[finding.level], markup=False, soft_wrap=True)
        console.print(
            f"{len(report.findings)} checks: {len(report.errors)} errors, {len(report.warnings)} warnings", markup=False
        )
    if not report.passes(strict=strict):
        sys.exit(1)


_STYLES = {"ok": "green", "warning": "yellow", "error": "red"}


def finding_line(finding: Finding) -> str:
    """One line of a report: what was found, and what to do if it is not as it should be."""
    if finding.level == "ok":
        return f"ok: {finding.key}: {_fact(finding.found)}"
    return f"{finding.level}: {finding.key}: {_fact(finding.found)}, expected {_fact(finding.expected)}; {finding.fix}"


def _fact(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)


@click.command(context_settings=HELP)
@click.argument("old", type=FILE)
@click.option("-o", "--output", type=FILE, help="GGUF file to write.")
@click.option("--in-place", is_flag=True, help="Replace OLD instead, in one step.")
@click.option("--target", type=FILE, help="GGUF of its target: adds the rope sections that M-RoPE targets need.")
@click.option("--mask-token-id", type=click.IntRange(min=0), help="The mask token, where the file names none.")
@click.option("--causal-swa", type=click.Choice(["on", "off"]), help="Whether sliding layers are causal in a block.")
@click.option(
    "--tap-shift", type=click.IntRange(0, 1), help="What a fork's tap ids lack to be layer inputs. Default: 1."
)
def upgrade(
    old: Path,
    output: Path | None,
    in_place: bool,
    target: Path | None,
    mask_token_id: int | None,
    causal_swa: str | None,
    tap_shift: int | None,
) -> None:
    """Put the metadata of the drafter GGUF file OLD right: a fork's names and keys, what newer targets need.

    Tensors are copied byte for byte. Nothing is written if there is nothing to do.
    """
    done = converter.upgrade(
        old,
        output,
        target=target,
        mask_token_id=mask_token_id,
        causal_swa=None if causal_swa is None else causal_swa == "on",
        tap_shift=tap_shift,
        in_place=in_place,
    )
    if done.output is None:
        console.print(f"{old} is up to date: nothing was written", markup=False, soft_wrap=True)
        return
    for change in done.changes:
        console.print(_change_line(change), markup=False, soft_wrap=True)
    console.print(
        f"{done.output}: {len(done.changes)} changes, {done.n_bytes / 1e6:.1f} MB", markup=False, soft_wrap=True
    )


def _change_line(change: Change) -> str:
    if change.old is None:
        return f"added {change.what} = {change.new}"
    if change.new is None:
        return f"removed {change.what}"
    return (
        f"{change.old} -> {change.new}"
        if change.what.endswith(change.old.split(" = ", 1)[0])
        else (f"{change.what}: {change.old} -> {change.new}")
    )


@click.command("list", context_settings=HELP)
@click.option("--json", "as_json", is_flag=True, help="All facts as JSON (docs/inspect.md has the schema).")
def list_pairs(as_json: bool) -> None:
    """List the published pairs, and say which can be converted and which run on the llama.cpp at hand."""
    found = converter.availability()
    if as_json:
        click.echo(json.dumps(converter.list_dict(found), indent=2))
        return
    table = Table()
    table.add_column("name", no_wrap=True)
    table.add_column("DFlash", justify="right")
    table.add_column("drafter", overflow="fold")
    table.add_column("converts")
    table.add_column("runs\nhere")
    for one in found:
        runs = {True: "yes", False: "no", None: "unknown"}[one.here]
        table.add_row(one.entry.key, str(one.entry.method), one.entry.drafter, _CONVERTS[one.entry.converts], runs)
    console.print(table)
    for one in found:
        option = one.entry.converts == "with-option" and f"convert with {one.entry.conversion}"
        for remark in (one.reason, option, one.entry.note, one.entry.license and f"licence {one.entry.license}"):
            if remark:
                console.print(f"{one.entry.key}: {remark}", markup=False, soft_wrap=True)


_CONVERTS = {"yes": "yes", "with-option": "option", "no": "no"}
