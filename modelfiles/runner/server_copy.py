"""A copy of a `llama-server` for everybody: Ollama's service has a user of its own, who sees no home folder."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from dflash2.hashing import sha256_file

_LIBRARIES = ("libllama", "libggml", "libmtmd")


def copy_path(server: Path, state: Path) -> Path:
    """Where in the folder `state` the copy of `server` belongs; the name is that of the contents."""
    digest = hashlib.sha256()
    for path in _parts(server):
        what = _link(path) or sha256_file(path)
        digest.update(os.fsencode(f"{path.name}\0{what}\0"))
    return state / f"server-{digest.hexdigest()[:16]}" / server.name


def copy_server(server: Path, copy: Path) -> None:
    """Copy `server` and llama.cpp's libraries beside it; a copy that is there already is complete and stays."""
    if copy.exists():
        return
    partial = copy.parent.with_name(f"{copy.parent.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    partial.chmod(0o755)
    for path in _parts(server):
        target = partial / path.name
        if link := _link(path):
            target.symlink_to(link)
            continue
        shutil.copyfile(path, target)
        target.chmod(0o755)
        with target.open("rb") as file:
            os.fsync(file.fileno())
    partial.rename(copy.parent)


def remove_other_copies(state: Path, copy: Path) -> None:
    """Remove every copy in `state` but `copy`; one that is running keeps what it has open."""
    for folder in state.glob("server-*"):
        if folder != copy.parent:
            shutil.rmtree(folder)


def _link(path: Path) -> str:
    """What `path` leads to in its own folder, empty if it is no link or leads out of there."""
    target = str(path.readlink()) if path.is_symlink() else ""
    return "" if os.sep in target else target


def _parts(server: Path) -> Iterator[Path]:
    """The program and its libraries, in order of their names."""
    for path in sorted(server.parent.iterdir()):
        library = path.name.startswith(_LIBRARIES) and (".so" in path.name or ".dylib" in path.name)
        if path.name == server.name or (library and path.is_file()):
            yield path
