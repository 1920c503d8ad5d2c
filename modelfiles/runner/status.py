"""How an Ollama's folder stands: whose `llama-server` is in place, and what has to be done about it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dflash2.modelfiles.runner.dispatcher import is_dispatcher
from dflash2.modelfiles.runner.places import Places
from dflash2.modelfiles.runner.record import Record, fingerprint, read_record

State = Literal["absent", "not installed", "installed", "incomplete", "interrupted", "upgraded", "broken"]


@dataclass(frozen=True)
class RunnerStatus:
    """How a folder stands.

    Attributes:
        folder: Ollama's folder of libraries.
        state: "absent": there is no llama-server. "not installed": Ollama's own, and nothing of ours. "installed".
            "incomplete": the dispatcher is in place, but something it needs is not as it was installed; `install`
            mends it. "interrupted": Ollama's own is in place, although an installation is on record. "upgraded":
            another llama-server than Ollama's at that time is in place. "broken": Ollama's own is lost.
        message: one sentence about it, with what to do.
        original: Ollama's own llama-server, wherever it lies now; None if it is lost.
        server: the server that drafts; None if there is none.
        server_version: what that server says it is, empty if there is none.
        ollama_version: version of Ollama that the installation was made for, empty if not known.
    """

    folder: Path
    state: State
    message: str
    original: Path | None = None
    server: Path | None = None
    server_version: str = ""
    ollama_version: str = ""


def runner_status(folder: Path) -> RunnerStatus:
    """How Ollama's `folder` stands; changes nothing. Raises OSError if a file there cannot be read."""
    places = Places(folder)
    record = read_record(places.record)
    if is_dispatcher(places.program):
        state, message = _with_dispatcher(places, record)
    else:
        state, message = _without_dispatcher(places, record)
    kept = is_dispatcher(places.program) or not os.path.lexists(places.program)
    original = places.original if kept else places.program
    return RunnerStatus(
        folder=places.folder,
        state=state,
        message=message,
        original=None if state in ("absent", "broken") else original,
        server=Path(record.server) if record else None,
        server_version=record.server_version if record else "",
        ollama_version=record.ollama_version if record else "",
    )


def _with_dispatcher(places: Places, record: Record | None) -> tuple[State, str]:
    kept = fingerprint(places.original)
    if not kept:
        return "broken", (
            f"Ollama's own llama-server, which was kept as {places.original}, is gone: install Ollama again, then run "
            "`dflash2 ollama runner install`."
        )
    if record is None:
        return "incomplete", f"The record {places.record} is gone; run `dflash2 ollama runner install` again."
    if kept != record.original:
        return "broken", (
            f"{places.original} is not the llama-server of Ollama that was kept there: install Ollama again, then run "
            "`dflash2 ollama runner install`."
        )
    if not os.access(record.server, os.X_OK):
        return "incomplete", (
            f"The server that drafts, {record.server}, is gone; run `dflash2 ollama runner install` again."
        )
    if fingerprint(places.program) != record.dispatcher:
        return "incomplete", (
            f"The dispatcher {places.program} is not as it was installed; run `dflash2 ollama runner install` again."
        )
    return "installed", f"The dispatcher is in place; models with a DFlash drafter run on {record.server}."


def _without_dispatcher(places: Places, record: Record | None) -> tuple[State, str]:
    found, kept = fingerprint(places.program), fingerprint(places.original)
    if not found and kept:
        return "interrupted", (
            f"There is no llama-server in {places.folder}, but Ollama's own is kept there; `dflash2 ollama runner "
            "restore` puts it back."
        )
    if not found:
        return "absent", f"There is no llama-server in {places.folder}; install Ollama again."
    if record is None and not kept:
        return "not installed", "Ollama runs its own llama-server for every model."
    if found in (kept, record.original if record else ""):
        return "interrupted", (
            "Ollama's own llama-server is in place, although an installation was begun; run `dflash2 ollama runner "
            "install` again, or `restore` to undo it."
        )
    return "upgraded", "Ollama was upgraded and runs its own llama-server; run `dflash2 ollama runner install` again."
