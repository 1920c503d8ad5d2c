"""The source tree that a build compiles: the pinned one, or somebody's own, with the patches or without."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dflash2.errors import PatchError
from dflash2.hashing import sha256_file
from dflash2.patches.apply import apply, remove, status
from dflash2.patches.bases import Base, base_named, identify
from dflash2.patches.series import Series
from dflash2.patches.source import source


@dataclass(frozen=True)
class Origin:
    """Where source comes from: somebody's `tree`, or None for the pinned sdist of `base`; `sha256` is of all of it."""

    base: Base
    tree: Path | None
    sha256: str


def origin(tree: Path | None, base: str) -> Origin:
    """The origin for a build; raises PatchError if `tree` is of no base, or a patch in it was changed."""
    if tree is None:
        pinned = base_named(base)
        return Origin(pinned, None, pinned.sha256)
    tree = tree.expanduser().absolute()
    found = status(tree)
    if found.changed:
        raise PatchError(f"{tree / found.changed[0]} was changed since it was patched; undo that first.")
    own = identify(tree) if found.left else base_named(found.base)
    return Origin(own, tree, _fingerprint(tree))


def make_tree(made_from: Origin, folder: Path, series: Series | None) -> Path:
    """The tree to compile: the pinned source itself, or `folder` with a copy of the source and `series` applied."""
    if made_from.tree is None and series is None:
        return source(made_from.base)
    if not folder.is_dir():
        partial = folder.with_name(f"{folder.name}.partial")
        if partial.exists():
            shutil.rmtree(partial)
        if made_from.tree is None:
            shutil.copytree(source(made_from.base), partial, copy_function=_link)
        else:
            shutil.copytree(made_from.tree, partial, ignore=_not_source, symlinks=True)
            remove(partial)
        if series is not None:
            apply(partial, series)
        # Renamed into place when complete: the folder's existence is the proof that it is whole.
        partial.rename(folder)
    return folder


def _link(original: str, copy: str) -> str:
    """A hard link costs no room; `apply` replaces files instead of writing into them."""
    with suppress(OSError):
        os.link(original, copy)
        return copy
    return str(shutil.copy2(original, copy))


def _not_source(folder: str, names: list[str]) -> set[str]:
    """Of a checkout, git's folder and build folders."""
    built = {name for name in names if (Path(folder) / name / "CMakeCache.txt").is_file()}
    return built | ({".git"} & set(names))


def _fingerprint(tree: Path) -> str:
    """SHA-256 over the names and contents of all files of somebody's tree."""
    digest = hashlib.sha256()
    for path in _files(tree):
        digest.update(f"{path.relative_to(tree).as_posix()}\0{sha256_file(path)}\n".encode())
    return digest.hexdigest()


def _files(tree: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(tree):
        left_out = _not_source(folder, [*folders, *names])
        folders[:] = sorted(name for name in folders if name not in left_out)
        paths = (Path(folder) / name for name in sorted(names) if name not in left_out)
        yield from (path for path in paths if path.is_file())
