"""What commands that hand a pair to an engine share: TARGET, DRAFTER, their options, and what is shown of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from dflash2.commands.converter import finding_line
from dflash2.commands.terminal import errors, progress_display
from dflash2.converter import OUT_TYPES
from dflash2.modelfiles import Pair, check_pair, resolve_pair

_Command = TypeVar("_Command", bound=Callable[..., Any])

_PARAMETERS = (
    click.argument("target"),
    click.argument("drafter", required=False),
    click.option("--revision", help="Branch, tag or commit of TARGET on the Hub."),
    click.option("--drafter-revision", help="The same of DRAFTER."),
    click.option("--offline", is_flag=True, help="Take what is on the Hub from the cache alone."),
    click.option(
        "--outtype",
        metavar=f"[{'|'.join(OUT_TYPES)}]",
        default="bf16",
        show_default=True,
        help="Type of a drafter that is converted first.",
    ),
    click.option("--no-check", is_flag=True, help="Only warn of a pair that does not fit."),
)


def pair_options(command: _Command) -> _Command:
    """Add TARGET, DRAFTER and the options that `ready_pair` takes, under its names."""
    for parameter in reversed(_PARAMETERS):
        command = parameter(command)
    return command


def ready_pair(
    target: str,
    drafter: str | None,
    *,
    revision: str | None,
    drafter_revision: str | None,
    offline: bool,
    outtype: str,
    no_check: bool,
) -> Pair:
    """`resolve_pair` and `check_pair`: progress, notes and findings go to standard error."""
    with progress_display() as progress:
        pair = resolve_pair(
            target,
            drafter,
            revision=revision,
            drafter_revision=drafter_revision,
            offline=offline,
            outtype=outtype,
            progress=progress,
        )
    for note in pair.notes:
        errors.print(f"note: {note}", style="yellow", markup=False, soft_wrap=True)
    for finding in check_pair(pair, warn_only=no_check).problems:
        errors.print(finding_line(finding), style="yellow", markup=False, soft_wrap=True)
    return pair
