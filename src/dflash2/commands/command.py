"""`dflash2 command`: how an engine starts a pair."""

from __future__ import annotations

import json

import click

from dflash2 import modelfiles
from dflash2.commands.terminal import HELP, console
from dflash2.constants import MAX_BLOCK_SIZE, MIN_BLOCK_SIZE


def _engine(_ctx: click.Context, _param: click.Parameter, name: str) -> modelfiles.Recipe:
    """The engine's recipe; a usage error if there is none."""
    found = modelfiles.recipe(name)
    if found is None:
        close = modelfiles.close_engines(name)
        known = ", ".join(one.key for one in modelfiles.RECIPES)
        hint = f"did you mean {' or '.join(close)}?" if close else f"there are {known}."
        raise click.BadParameter(f"{name!r} is no engine; {hint}")
    return found


@click.command(context_settings=HELP, epilog=f"Engines: {', '.join(one.key for one in modelfiles.RECIPES)}.")
@click.argument("engine", callback=_engine)
@click.argument("target", metavar="PAIR|TARGET")
@click.argument("drafter", required=False)
@click.option(
    "--block-size",
    type=click.IntRange(MIN_BLOCK_SIZE, MAX_BLOCK_SIZE),
    help="The drafter's block size in tokens, where it is not on record.",
)
@click.option("--command-only", is_flag=True, help="The commands alone, for a shell.")
@click.option("--json", "as_json", is_flag=True, help="Everything as JSON (docs/engines.md has the schema).")
def command(
    engine: modelfiles.Recipe,
    target: str,
    drafter: str | None,
    block_size: int | None,
    command_only: bool,
    as_json: bool,
) -> None:
    """Say how ENGINE starts a pair: what to install, what to run, and where its limits are.

    PAIR is the name of a published pair (`dflash2 list`). Instead of it, TARGET and DRAFTER may be given: Hub ids
    (owner/name), folders, GGUF files or names of published pairs. Nothing is fetched or run.
    """
    try:
        pair = modelfiles.pair_names(target, drafter, block_size=block_size, counted=engine.counts != "by itself")
    except modelfiles.PairNameError as error:
        raise click.UsageError(str(error)) from None
    found = modelfiles.launch(engine, pair)
    if as_json:
        click.echo(json.dumps(found.to_dict(), indent=2))
        return
    if not command_only:
        click.echo("".join(f"{line}\n" for line in engine.install))
    click.echo(found.script, nl=False)
    if command_only:
        return
    console.print()
    heading = f"{engine.title} ({engine.runs_on}), as of {engine.version}"
    number = "up to block size - 1" if found.tokens is None else str(found.tokens)
    console.print(f"{heading}: {number} draft tokens, {_COUNTS[engine.counts]}", markup=False, soft_wrap=True)
    for note in found.notes:
        console.print(f"- {note}", markup=False, soft_wrap=True)


_COUNTS = {
    "block size": "which it counts as the block size",
    "block size - 1": "which it counts as the block size less the anchor",
    "by itself": "at most: it adapts the number by itself",
}
