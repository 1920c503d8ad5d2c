"""From what a user names to two checkpoint folders, which Ollama's MLX engine takes instead of GGUF files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

from dflash2 import converter, hub
from dflash2.cache import cache_folder
from dflash2.converter import Finding, Report
from dflash2.errors import CheckpointError, HubError, OutputError
from dflash2.hub import Snapshot
from dflash2.hub_progress import Progress as BytesDone
from dflash2.modelfiles.pairs import (
    Progress,
    no_progress,
    published_drafter,
    refuse_revision,
    require_fit,
    require_known,
)
from dflash2.regular_file import exists
from dflash2.whole_file import replacing

_CACHE = "folders"
_COMMIT_LENGTH = 12
_TARGET_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
# What Ollama's MLX engine registers, and DFlash 2 as its pull request 17865 does.
_ARCHITECTURES = ("DFlashDraftModel", "DFlash2DraftModel", "DFlashLagunaForCausalLM", "MuseGlimmerAssistantModel")
# What `converter.check` says of GGUF and llama.cpp, which have no part in this route.
_OTHER_CHECKS = frozenset({"checkpoint", "tappable", "rope_factors", "causality"})


@dataclass(frozen=True)
class Folders:
    """Two checkpoint folders of plain files, absolute."""

    target: Path
    drafter: Path


def resolve_folders(
    target: str,
    drafter: str | None = None,
    *,
    revision: str | None = None,
    drafter_revision: str | None = None,
    offline: bool = False,
    progress: Progress | None = None,
) -> Folders:
    """Find or fetch the folders of a pair.

    Args:
        target: folder of a checkpoint, its Hub id, or the name of a published pair.
        drafter: the same; may be left out if `target` is the name of a published pair.
        revision: branch, tag or commit of the target's repository; `drafter_revision` of the drafter's.
        offline: take what is on the Hub from its cache alone.
        progress: called with (what is being done, bytes done, bytes in all).

    Raises HubError, CheckpointError, and OutputError if the cache cannot be written.
    """
    report = progress or no_progress
    require_known(target)
    drafter = published_drafter(target) if drafter is None else drafter
    require_known(drafter)
    known, known_drafter = converter.resolve(target), converter.resolve(drafter)
    drafter_folder = _folder(
        known_drafter.drafter if known_drafter else drafter,
        hub.drafter_files,
        drafter_revision,
        offline,
        partial(report, "fetching the drafter"),
    )
    target_folder = _folder(
        known.target if known else target, _target_files, revision, offline, partial(report, "fetching the target")
    )
    return Folders(target_folder, drafter_folder)


def check_folders(pair: Folders, *, warn_only: bool = False) -> Report:
    """Whether the two fit and MLX knows the drafter's architecture; raises TargetMismatchError unless `warn_only`."""
    checkpoint = converter.inspect(pair.drafter).checkpoint
    name = checkpoint.dialect if checkpoint else None
    fix = "" if name in _ARCHITECTURES else "use the gguf route"
    known = Finding("error" if fix else "ok", "architecture", list(_ARCHITECTURES), name, fix)
    report = converter.check(pair.drafter, pair.target, library=False)
    others = (finding for finding in report.findings if finding.key not in _OTHER_CHECKS)
    report = Report(report.drafter, report.target, (known, *others))
    if not warn_only:
        require_fit(report, str(pair.drafter), str(pair.target))
    return report


def _folder(spec: str, choose: hub.Choose, revision: str | None, offline: bool, progress: BytesDone) -> Path:
    if exists(Path(spec)):
        refuse_revision(spec, revision)
        return _local_folder(Path(spec))

    def choose_whole(names: Sequence[str]) -> list[str]:
        chosen = choose(names)
        if "config.json" not in chosen or not any(name.endswith(".safetensors") for name in chosen):
            raise HubError(f"{spec} has no config.json with safetensors files; give the repository of a checkpoint.")
        return chosen

    return _plain_copy(hub.resolve_files(spec, choose_whole, revision=revision, offline=offline, progress=progress))


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
