"""Apply the series to a source tree of llama.cpp, and take it away again.

The tree remembers what was done to it (`state.py`). So whatever version of this package applied a series, it can be
removed, and an interrupted call is finished by the next.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from dflash2.errors import PatchError
from dflash2.hashing import sha256_file
from dflash2.patches.bases import Base, base_named, describe, identify
from dflash2.patches.disk import writing
from dflash2.patches.series import Patch, Series, read_series
from dflash2.patches.state import ORIGINALS, State, digest, forget, has_leftovers, keep, lock, original, put, read_state


@dataclass(frozen=True)
class Status:
    """Whether a tree is patched, of which base it is, and which files somebody changed since.

    `complete` is False after an interrupted call; `current` says whether the patches are those of this version.
    `left` says that every patched file was replaced by that of another version, as git's checkout does it: only what
    was added is still there, and `base` is what the tree holds now.
    """

    base: str
    patched: bool
    complete: bool
    current: bool
    changed: tuple[str, ...]
    left: bool = False


def status(tree: Path, series: Series | None = None) -> Status:
    """How the tree stands; raises PatchError if it is of no base."""
    with lock(tree):
        return _status(tree, series or read_series())


def _status(tree: Path, series: Series) -> Status:
    state = read_state(tree)
    if state is None:
        return Status(identify(tree).name, patched=False, complete=True, current=False, changed=())
    if _has_left(tree, state):
        return Status(describe(tree), patched=False, complete=True, current=False, changed=(), left=True)
    wanted, changed = {**state.after, **state.added}, _changed(tree, state)
    complete = all(name in changed or digest(tree / name) == wanted[name] for name in wanted)
    return Status(state.base, True, complete, state.series == series.digest, changed)


def _changed(tree: Path, state: State) -> tuple[str, ...]:
    """Files that are neither as they were before nor as the patches made them."""
    wanted = {**state.after, **state.added}
    return tuple(name for name in wanted if digest(tree / name) not in (wanted[name], state.before.get(name)))


def _has_left(tree: Path, state: State) -> bool:
    """Whether no file is patched any more, and some are not what they were before either."""
    present = {name: digest(tree / name) for name in state.after}
    return present != state.before and all(present[name] != state.after[name] for name in present)


def apply(tree: Path, series: Series | None = None) -> Base:
    """Apply the series (default: that of this package) to `tree`, all of it or nothing, and return the tree's base.

    A tree that has it already stays as it is; one that has the series of another version gets this one instead.
    Raises PatchError if the tree is of no base, a patch is not verified on it, or somebody changed a patched file.
    """
    series = series or read_series()
    with lock(tree), writing(tree, PatchError):
        now = _status(tree, series)
        if now.patched and now.current and now.complete and not now.changed:
            return base_named(now.base)
        if now.left:
            _refuse_unknown(tree)
        _remove(tree)
        return _apply(tree, series)


def _refuse_unknown(tree: Path) -> None:
    try:
        identify(tree)
    except PatchError as error:
        raise PatchError(f"{error} `dflash2 patch {tree} --remove` takes away what is left of the patches.") from error


def _apply(tree: Path, series: Series) -> Base:
    base = identify(tree)
    for patch in series.patches:
        if base.name not in patch.bases:
            raise PatchError(f"{patch.name} is verified on {', '.join(patch.bases)}, not on {base.name}.")
    taken = [name for name in series.sources if (tree / name).exists()]
    if taken:
        raise PatchError(f"{tree / taken[0]} is in the way: the patches bring a file of that name; move it elsewhere.")
    patched = patched_files(tree, series)
    added = {name: series.source_path(name).read_bytes() for name in series.sources}
    keep(tree, State(base.name, series.digest, *_digests(tree, patched, added)))
    for name, content in {**added, **patched}.items():
        put(tree, name, content)
    return base


def remove(tree: Path) -> None:
    """Take the series away from `tree`, whatever version applied it; a tree without it stays as it is.

    Of a tree that has become another version since, only our own files are taken. Raises PatchError, and changes
    nothing, if a patched file was changed since or what it was before was lost.
    """
    with lock(tree), writing(tree, PatchError):
        _remove(tree)


def _remove(tree: Path) -> None:
    state = read_state(tree)
    if state is None:
        if has_leftovers(tree):
            identify(tree)  # an unpatched tree needs no copies; of any other they may be the only ones
            forget(tree)
        return
    restored = dict[str, bytes]()
    if not _has_left(tree, state):
        if changed := _changed(tree, state):
            raise PatchError(
                f"{tree / changed[0]} was changed since it was patched; undo that first. What it was before lies in "
                f"{tree / ORIGINALS}."
            )
        patched = [name for name in state.after if digest(tree / name) == state.after[name]]
        restored = {name: original(tree, state, name) for name in patched}
    for name, content in restored.items():
        put(tree, name, content)
    for name, ours in state.added.items():
        if digest(tree / name) == ours:
            (tree / name).unlink()
    forget(tree)


def patched_files(tree: Path, series: Series) -> dict[str, bytes]:
    """Content that every upstream file has after the series; `tree` stays as it is. Raises PatchError."""
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch) / "tree"
        for name in series.touched:
            if not (tree / name).is_file():
                raise PatchError(f"{tree} has no {name}, which the patches change.")
            (work / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(tree / name, work / name)
        for patch in series.patches:
            _run_tool(patch, series.folder / patch.name, work)
        return {name: (work / name).read_bytes() for name in series.touched}


def _run_tool(patch: Patch, path: Path, work: Path) -> None:
    """Apply one patch in the folder `work` with git or patch, whichever is there."""
    if git := shutil.which("git"):
        command = [git, "apply", "--whitespace=nowarn", str(path.absolute())]
    elif tool := shutil.which("patch"):
        command = [tool, "-p1", "-F0", "-N", "-t", "-i", str(path.absolute())]
    else:
        raise PatchError("git or patch is needed to apply patches, and neither was found.")
    # git must not find a repository around the scratch folder: it would take the paths as that repository's.
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(work.parent), "LC_ALL": "C"}
    result = subprocess.run(command, cwd=work, capture_output=True, text=True, check=False, env=environment)
    if result.returncode:
        raise PatchError(f"{patch.name} does not apply: {(result.stdout + result.stderr).strip()[-500:]}")


def _digests(
    tree: Path, patched: dict[str, bytes], added: dict[str, bytes]
) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
    before = {name: sha256_file(tree / name) for name in patched}
    after = {name: hashlib.sha256(content).hexdigest() for name, content in patched.items()}
    return before, after, {name: hashlib.sha256(content).hexdigest() for name, content in added.items()}
