"""What an installation notes, so that later ones know whose file lies where."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from dflash2.hashing import sha256_file


@dataclass(frozen=True)
class Record:
    """An installation.

    Attributes:
        original: `fingerprint` of Ollama's own llama-server.
        dispatcher: `fingerprint` of the dispatcher in its place.
        server: path of the server that drafts.
        server_version: what that server says it is.
        ollama_version: empty if it was not known.
    """

    original: str
    dispatcher: str
    server: str
    server_version: str
    ollama_version: str


def fingerprint(path: Path) -> str:
    """What tells a file from another: SHA-256 of its contents, where a link leads to, or nothing if it is not there."""
    if path.is_symlink():
        return f"link to {path.readlink()}"
    return sha256_file(path) if path.is_file() else ""


def read_record(path: Path) -> Record | None:
    """The record at `path`, None if there is none that can be understood."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return Record(**{field.name: str(values[field.name]) for field in fields(Record)})
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def write_record(path: Path, record: Record) -> None:
    """Write the record as a whole."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(asdict(record), indent=2) + "\n", encoding="utf-8")
    partial.chmod(0o644)
    partial.replace(path)
