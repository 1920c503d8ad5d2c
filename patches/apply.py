"""Apply the series to a source tree of llama.cpp, and take it away again.

What the tree held before lies in its folder `.dflash2-patches`, with the SHA-256 of every file before and after. So
whatever version of this package applied a series, it can be removed, and an interrupted call is finished by the next.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from dflash2.errors import PatchError
from dflash2.hashing import sha256_file
from dflash2.patches.bases import Base, base_named, identify
from dflash2.patches.series import Patch, Series, read_series

_STATE = ".dflash2-patches"


@dataclass(frozen=True)
class _State:
    """What was done to a tree: SHA-256 of each upstream file before and after, and of each file of ours."""

    base: str
    series: str
    before: dict[str, str]
    after: dict[str, str]
    added: dict[str, str]


@dataclass(frozen=True)
class Status:
    """Whether a tree is patched, of which base it is, and which files somebody changed since.

    `complete` is False after an interrupted call; `current` says whether the patches are those of this version.
    """

    base: str
    patched: bool
    complete: bool
    current: bool
    changed: tuple[str, ...]


def status(tree: Path, series: Series | None = None) -> Status:
    """How the tree stands; raises PatchError if it is of no base."""
    state = _read_state(tree)
    if state is None:
        return Status(identify(tree).name, patched=False, complete=True, current=False, changed=())
    present = {name: _sha256(tree / name) for name in (*state.after, *state.added)}
    wanted = {**state.after, **state.added}
    pending = tuple(n for n in present if present[n] != wanted[n] and present[n] == state.before.get(n))
    changed = tuple(n for n in present if present[n] not in (wanted[n], state.before.get(n)))
    current = state.series == (series or read_series()).digest
    return Status(state.base, patched=True, complete=not pending, current=current, changed=changed)


def apply(tree: Path, series: Series | None = None) -> Base:
    """Apply the series (default: that of this package) to `tree`, all of it or nothing, and return the tree's base.

    A tree that has it already stays as it is; one that has the series of another version gets this one instead.
    Raises PatchError if the tree is of no base, a patch is not verified on it, or somebody changed a patched file.
    """
    series = series or read_series()
    now = status(tree, series)
    if now.patched:
        if now.current and now.complete and not now.changed:
            return base_named(now.base)
        remove(tree)
    base = identify(tree)
    for patch in series.patches:
        if base.name not in patch.bases:
            raise PatchError(f"{patch.name} is verified on {', '.join(patch.bases)}, not on {base.name}.")
    taken = [name for name in series.sources if (tree / name).exists()]
    if taken:
        raise PatchError(f"{tree / taken[0]} is in the way: the patches bring a file of that name; move it elsewhere.")
    patched = patched_files(tree, series)
    added = {name: series.source_path(name).read_bytes() for name in series.sources}
    _keep_originals(tree, _State(base.name, series.digest, *_digests(tree, patched, added)))
    for name, content in {**added, **patched}.items():
        _write(tree / name, content)
    return base


def remove(tree: Path) -> None:
    """Take the series away from `tree`, whatever version applied it; a tree without it stays as it is.

    Raises PatchError, and changes nothing, if a patched file was changed since.
    """
    state = _read_state(tree)
    if state is None:
        return
    changed = status(tree).changed
    if changed:
        raise PatchError(
            f"{tree / changed[0]} was changed since it was patched; undo that first. What it was before lies in "
            f"{tree / _STATE / 'original'}."
        )
    for name in state.before:
        _write(tree / name, (tree / _STATE / "original" / name).read_bytes())
    for name in state.added:
        (tree / name).unlink(missing_ok=True)
    shutil.rmtree(tree / _STATE)


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


def _keep_originals(tree: Path, state: _State) -> None:
    """Copy what will be replaced; the state is written last, so that it is there only with all the copies."""
    folder = tree / _STATE
    for name in state.before:
        _write(folder / "original" / name, (tree / name).read_bytes())
    _write(folder / ".gitignore", b"*\n")
    _write(folder / "state.json", (json.dumps(asdict(state), indent=1) + "\n").encode())


def _read_state(tree: Path) -> _State | None:
    path = tree / _STATE / "state.json"
    return _State(**json.loads(path.read_text())) if path.is_file() else None


def _sha256(path: Path) -> str | None:
    return sha256_file(path) if path.is_file() else None


def _write(path: Path, content: bytes) -> None:
    """Replace the file as a whole; its old content may be shared with another tree by a hard link."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_bytes(content)
    if path.exists():
        shutil.copymode(path, partial)
    partial.replace(path)
