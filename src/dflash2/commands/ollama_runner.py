"""`dflash2 ollama runner`: the program that Ollama runs models with."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dflash2.builds import server_builds
from dflash2.commands.terminal import FILE, console, errors
from dflash2.errors import RunnerError

if TYPE_CHECKING:
    from dflash2.modelfiles.runner import RunnerStatus

_FOLDER = click.option(
    "--folder",
    type=FILE,
    default=None,
    help="Ollama's folder with its llama-server. Default: of the ollama on PATH.",
)
_DRY_RUN = click.option("--dry-run", is_flag=True, help="Only say what would be done.")


@click.group()
def runner() -> None:
    """Let Ollama draft with DFlash 2: our llama-server for models with a drafter, Ollama's own for all others."""


@runner.command()
@_FOLDER
@click.option("--server", type=FILE, default=None, help="A llama-server to use. Default: that of `dflash2 build`.")
@_DRY_RUN
def install(folder: Path | None, server: Path | None, dry_run: bool) -> None:
    """Put a dispatcher in the place of Ollama's llama-server, which is kept beside it; again after an upgrade."""
    from dflash2.modelfiles import runner as room

    folder = folder or room.find_folder()
    server = server or _built_server()
    with _advice_on_permission("install", folder, server):
        after = room.install(folder, server, ollama_version=room.ollama_version(), progress=_said, dry_run=dry_run)
    if not dry_run:
        _show(after)
        console.print(
            "Models that are loaded now stay on the server they were loaded with; `ollama stop` ends them.",
            soft_wrap=True,
        )


@runner.command()
@_FOLDER
def status(folder: Path | None) -> None:
    """Say whose llama-server is in place, and whether an upgrade of Ollama has replaced it."""
    from dflash2.modelfiles import runner as room

    _show(room.runner_status(folder or room.find_folder()))


@runner.command()
@_FOLDER
@_DRY_RUN
def restore(folder: Path | None, dry_run: bool) -> None:
    """Put Ollama's own llama-server back; an upgraded one stays. Nothing of ours is left."""
    from dflash2.modelfiles import runner as room

    folder = folder or room.find_folder()
    before = room.runner_status(folder)
    if before.state == "upgraded":
        console.print(
            "Ollama was upgraded: its new llama-server stays, and the old one that was kept goes.", soft_wrap=True
        )
    with _advice_on_permission("restore", folder):
        after = room.restore(folder, progress=_said, dry_run=dry_run)
    if not dry_run:
        _show(after)


def _said(step: str) -> None:
    errors.print(step, markup=False, soft_wrap=True)


def _built_server() -> Path:
    builds = server_builds()
    if not builds:
        raise RunnerError("There is no patched llama-server; `dflash2 build --targets server` makes one.")
    return builds[0].server


def _show(status: RunnerStatus) -> None:
    rows = [
        ("folder", str(status.folder)),
        ("state", status.state),
        ("Ollama's server", str(status.original or "lost")),
        ("drafting server", f"{status.server}, {status.server_version}" if status.server else "none"),
        ("installed for", f"Ollama {status.ollama_version}" if status.ollama_version else ""),
    ]
    for label, value in rows:
        if value:
            console.print(f"{label:<16}  {value}", markup=False, soft_wrap=True)
    console.print(status.message, markup=False, soft_wrap=True)


@contextmanager
def _advice_on_permission(verb: str, folder: Path, server: Path | None = None) -> Iterator[None]:
    """Name the command to run with sudo, in full: there, neither this PATH nor this cache is known."""
    try:
        yield
    except RunnerError as error:
        if not isinstance(error.__cause__, PermissionError):
            raise
        program = Path(sys.argv[0]).absolute()
        command = ["sudo", str(program), "ollama", "runner", verb, "--folder", str(folder.absolute())]
        if server is not None:
            command += ["--server", str(server.absolute())]
        raise RunnerError(f"{str(error).removesuffix('.')}; run: {shlex.join(command)}") from error
