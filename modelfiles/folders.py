"""From what a user names to two checkpoint folders, which Ollama's MLX engine takes instead of GGUF files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from dflash2 import converter, hub
from dflash2.cache import cache_folder
from dflash2.converter import Report
from dflash2.errors import CheckpointError, HubError, OutputError
from dflash2.hub import Snapshot
from dflash2.modelfiles.pairs import Progress, require_fit
from dflash2.regular_file import exists
from dflash2.whole_file import replacing

_CACHE = "folders"
_COMMIT_LENGTH = 12
_TARGET_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
# What `converter.check` says of llama.cpp, which has no part in this route.
_LLAMA_CPP_CHECKS = frozenset({
    "tappable", "rope_factors", "causality", "library", "library_functions", "library_drafter", "library_target",
})  # fmt: skip


@dataclass(frozen=True)
class Folders:
    """Two checkpoint folders of plain files, absolute; `block_size` counts tokens, the anchor included."""

    target: Path
    drafter: Path
    block_size: int | None


def resolve_folders(
    target: str, drafter: str | None = None, *, offline: bool = False, progress: Progress | None = None
) -> Folders:
    """Find or fetch the folders of a pair.

    Args:
        target: folder of a checkpoint, its Hub id, or the name of a published pair.
        drafter: the same; may be left out if `target` is the name of a published pair.
        offline: take what is on the Hub from its cache alone.
        progress: called with (what is being done, bytes done, bytes in all).

    Raises HubError, CheckpointError, and OutputError if the cache cannot be written.
    """
    known = converter.resolve(target)
    if drafter is None:
        if known is None:
            raise HubError(f"{target!r} is no published pair, so its drafter must be named too.")
        drafter = known.drafter
    known_drafter = converter.resolve(drafter)
    drafter_folder = _folder(
        known_drafter.drafter if known_drafter else drafter, "drafter", hub.drafter_files, offline, progress
    )
    target_folder = _folder(known.target if known else target, "target", _target_files, offline, progress)
    checkpoint = converter.inspect(drafter_folder).checkpoint
    config = checkpoint.config if checkpoint else None
    return Folders(target_folder, drafter_folder, config.block_size if config else None)


def check_folders(pair: Folders, *, warn_only: bool = False) -> Report:
    """What `converter.check` says of the two, but for llama.cpp; raises TargetMismatchError unless `warn_only`."""
    report = converter.check(pair.drafter, pair.target)
    findings = tuple(finding for finding in report.findings if finding.key not in _LLAMA_CPP_CHECKS)
    report = Report(report.drafter, report.target, findings)
    if not warn_only:
        require_fit(report, str(pair.drafter), str(pair.target))
    return report


def _folder(spec: str, role: str, choose: hub.Choose, offline: bool, progress: Progress | None) -> Path:
    if spec and exists(Path(spec)):
        return _local_folder(Path(spec))

    def choose_whole(names: Sequence[str]) -> list[str]:
        chosen = choose(names)
        if "config.json" not in chosen or not any(name.endswith(".safetensors") for name in chosen):
            raise HubError(f"{spec} has no config.json with safetensors files; give the repository of a checkpoint.")
        return chosen

    def report(done: int, total: int) -> None:
        if progress:
            progress(f"fetching the {role}", done, total)

    return _plain_copy(hub.resolve_files(spec, choose_whole, offline=offline, progress=report))


def _local_folder(folder: Path) -> Path:
    if not folder.is_dir() or not any(folder.glob("*.safetensors")):
        raise CheckpointError(f"{folder} is no folder of safetensors files, which the mlx route needs; give one.")
    real = folder.resolve()
    for path in real.iterdir():
        if path.is_symlink() and not path.resolve().is_relative_to(real):
            raise CheckpointError(
                f"{path} is a link that leaves its folder, which Ollama refuses; give the model's Hub id instead, or"
                " download it with `hf download ID --local-dir FOLDER`."
            )
    return real


def _target_files(names: Sequence[str]) -> list[str]:
    return [name for name in names if "/" not in name and any(fnmatchcase(name, one) for one in _TARGET_FILES)]


def _plain_copy(found: Snapshot) -> Path:
    """The files of a snapshot without its links: as second names of the same data where the disk allows it."""
    assert found.repo_id is not None and found.revision is not None, "what comes from the Hub has both"
    folder = cache_folder(_CACHE) / f"{found.repo_id.replace('/', '--')}-{found.revision[:_COMMIT_LENGTH]}"
    for file in found.files:
        place = folder / file.name
        if place.exists():
            continue
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            with replacing(place) as temporary:
                try:
                    os.link(file.path.resolve(), temporary)
                except OSError:
                    shutil.copyfile(file.path, temporary)
        except OSError as error:
            raise OutputError(f"Cannot write {place}: {error.strerror or error}.") from error
    return folder
