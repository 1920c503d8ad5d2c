"""What a patched tree remembers, in its folder `.dflash2-patches`: SHA-256 of every file, and what was there before.

Files are written here first and then put in place, so that what a killed call left is in this folder and goes with it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import asdict, dataclass, fields
from pathlib import Path, PurePosixPath

from filelock import FileLock

from dflash2.cache import cache_folder
from dflash2.errors import PatchError
from dflash2.hashing import sha256_file

_FOLDER = ".dflash2-patches"
ORIGINALS = f"{_FOLDER}/original"


@dataclass(frozen=True)
class State:
    """What was done to a tree: SHA-256 of each upstream file before and after, and of each file of ours."""

    base: str
    series: str
    before: dict[str, str]
    after: dict[str, str]
    added: dict[str, str]


def lock(tree: Path) -> FileLock:
    """Holds off other processes of this user that patch `tree`. It lies in the cache: the tree gets nothing."""
    name = hashlib.sha256(str(tree.resolve()).encode()).hexdigest()[:16]
    return FileLock(cache_folder("locks") / f"{name}.lock")


def read_state(tree: Path) -> State | None:
    """The state of `tree`, None if it is not patched; raises PatchError for one that no call of ours wrote."""
    path = tree / _FOLDER / "state.json"
    try:
        loaded = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise PatchError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError):
        loaded = None
    if not _is_state(loaded):
        raise PatchError(f"{path} is not what `dflash2 patch` writes; check {tree} out anew and delete {path.parent}.")
    return State(**loaded)


def _is_state(loaded: object) -> bool:
    if not isinstance(loaded, dict) or loaded.keys() != {field.name for field in fields(State)}:
        return False
    if not all(isinstance(loaded[name], str) for name in ("base", "series")):
        return False
    tables = [loaded[name] for name in ("before", "after", "added")]
    return all(map(_is_table, tables)) and tables[0].keys() == tables[1].keys()


def _is_table(value: object) -> bool:
    """Whether it gives texts by paths, none of which leads out of the tree or into the state's own folder."""
    if not isinstance(value, dict) or not all(isinstance(digest, str) for digest in value.values()):
        return False
    paths = [PurePosixPath(name) for name in value]
    outside = any(path.is_absolute() or not path.parts or {"..", _FOLDER} & {*path.parts} for path in paths)
    return not outside and not any(set(name) & set("\\:\0") for name in value)


def keep(tree: Path, state: State) -> None:
    """Copy what will be replaced; the state is written last, so that it is there only with all the copies."""
    put(tree, f"{_FOLDER}/.gitignore", b"*\n")
    for name in state.before:
        put(tree, f"{ORIGINALS}/{name}", (tree / name).read_bytes())
    put(tree, f"{_FOLDER}/state.json", (json.dumps(asdict(state), indent=1) + "\n").encode())


def original(tree: Path, state: State, name: str) -> bytes:
    """What the file `name` of `tree` was before; raises PatchError if that was lost or changed."""
    path = tree / ORIGINALS / name
    content = path.read_bytes() if path.is_file() else b""
    if hashlib.sha256(content).hexdigest() != state.before[name]:
        raise PatchError(f"{path} is not what {name} was before; check {name} out anew, and then remove again.")
    return content


def has_leftovers(tree: Path) -> bool:
    """Whether the folder of the state is there, with a state or without."""
    return (tree / _FOLDER).is_dir()


def forget(tree: Path) -> None:
    """Delete the state and the copies."""
    shutil.rmtree(tree / _FOLDER)


def put(tree: Path, name: str, content: bytes) -> None:
    """Replace a file of `tree` as a whole; its old content may be shared with another tree by a hard link."""
    path = tree / name
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = tree / _FOLDER / "partial"
    partial.parent.mkdir(exist_ok=True)
    partial.write_bytes(content)
    if path.exists():
        shutil.copymode(path, partial)
    partial.replace(path)


def digest(path: Path) -> str | None:
    """SHA-256 of the file, None if there is none."""
    return sha256_file(path) if path.is_file() else None
