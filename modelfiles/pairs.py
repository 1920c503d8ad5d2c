"""From what a user names to a ready pair of GGUF files: local paths, Hub ids and names of published pairs.

Downloads go through `dflash2.hub`; drafter checkpoints are converted once, into the cache, under a name that follows
from their content.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from filelock import FileLock

from dflash2 import __version__, converter, hub
from dflash2.cache import cache_folder
from dflash2.converter import OUT_TYPES, Overrides, RegistryEntry, Report
from dflash2.errors import CheckpointError, GGUFError, HubError, OptionError, TargetMismatchError
from dflash2.gguf_info import read_gguf_info
from dflash2.hashing import sha256_file
from dflash2.hub import Snapshot
from dflash2.modelfiles.gguf_choice import choose_drafter, choose_target, split_quant
from dflash2.regular_file import exists, system_errors

# Called with what is being done, the bytes done and the bytes in all.
Progress = Callable[[str, int, int], None]

# Whose repositories `NAME-GGUF` hold a published target as GGUF, beside its own owner: llama.cpp's.
_GGUF_OWNER = "ggml-org"
_CACHE = "drafters"
_KEY_LENGTH = 12
_NAME_BYTES = 100  # of the 255 that a file's name can have
_NO_OVERRIDES = Overrides()


@dataclass(frozen=True)
class ModelFile:
    """One GGUF model on this disk: `path` is its file, of a split model the first of `n_parts`.

    `label` is what a user knows it by (`owner/name`, or the path), `repo_id` and `revision` (the commit) where it or
    the checkpoint it was converted from comes from; None for local ones.
    """

    path: Path
    label: str
    repo_id: str | None = None
    revision: str | None = None
    n_parts: int = 1

    @property
    def real_path(self) -> Path:
        """The absolute file itself: in the Hub's cache `path` is a link that leaves its folder."""
        return self.path.resolve()


@dataclass(frozen=True)
class Pair:
    """A target and its drafter, both GGUF files.

    `block_size` counts tokens, the anchor included: block_size - 1 are drafted. `notes` are what a conversion had to
    say; empty where nothing was converted.
    """

    target: ModelFile
    drafter: ModelFile
    block_size: int
    notes: tuple[str, ...] = field(default=())


def resolve_pair(
    target: str,
    drafter: str | None = None,
    *,
    revision: str | None = None,
    drafter_revision: str | None = None,
    offline: bool = False,
    outtype: str = "bf16",
    overrides: Overrides = _NO_OVERRIDES,
    progress: Progress | None = None,
) -> Pair:
    """Find, fetch and convert what is needed for a pair of GGUF files.

    Args:
        target: GGUF file; Hub id of a repository of GGUF files, `owner/name` or `owner/name:QUANT` (llama.cpp's
            rules: Q4_K_M, else Q8_0, else the first); or the name of a published pair, also with `:QUANT`.
        drafter: GGUF file; folder of a checkpoint; Hub id of either (`:QUANT` for GGUF files); or the name of a
            published pair. May be left out if `target` is the name of a published pair.
        revision: branch, tag or commit of the target's repository; `drafter_revision` of the drafter's.
        offline: take what is on the Hub from the cache alone (so does HF_HUB_OFFLINE=1).
        outtype: type of a converted drafter, as `converter.convert` takes it.
        overrides: what goes before the values of a checkpoint's config, likewise.
        progress: called with (what is being done, bytes done, bytes in all).

    Raises HubError for what cannot be had, GGUFError and CheckpointError for files that cannot be read, and what
    `converter.convert` raises. Whether the two fit is `check_pair`'s to say.
    """
    report = progress or no_progress
    if outtype.lower() not in OUT_TYPES:
        raise OptionError(f"{outtype!r} is no type of a drafter; give one of {', '.join(OUT_TYPES)}.")
    require_known(target)
    drafter = published_drafter(target) if drafter is None else drafter
    require_known(drafter)
    # The drafter first: it is the smaller download, and the likelier one to fail.
    found = _find_drafter(drafter, drafter_revision, offline, report)
    if isinstance(found, Snapshot) and overrides == _NO_OVERRIDES:
        _require_convertible(found)
    target_file = _find_target(target, revision, offline, report)
    notes: tuple[str, ...] = ()
    if isinstance(found, ModelFile):
        drafter_file = found
    else:
        drafter_file, notes = _converted(found, target_file, outtype, overrides, report)
    facts = converter.inspect(drafter_file.path).drafter
    if facts is None:
        raise GGUFError(f"{drafter_file.path} is no DFlash drafter; give the target first, then the drafter.")
    if not facts.block_size:
        raise GGUFError(f"{drafter_file.path} names no block size; convert it again with --block-size.")
    return Pair(target_file, drafter_file, facts.block_size, notes)


def check_pair(pair: Pair, *, warn_only: bool = False) -> Report:
    """What `converter.check` says of the two files, llama-cpp-python aside; its warnings are for the caller to show.

    Raises TargetMismatchError with all errors in one sentence, unless `warn_only`.
    """
    report = converter.check(pair.drafter.path, pair.target.path, library=False)
    if not warn_only:
        require_fit(report, pair.drafter.label, pair.target.label)
    return report


def require_fit(report: Report, drafter: str, target: str) -> None:
    """Raise TargetMismatchError with all errors of `report` in one sentence, if there are any."""
    if report.errors:
        found = "; ".join(f"{finding.key} is {finding.found}, {finding.fix}" for finding in report.errors)
        raise TargetMismatchError(f"{drafter} does not work with {target}: {found}.")


def require_known(spec: str) -> None:
    """Raise HubError for what is nothing here and no name of anything elsewhere: nothing is fetched before."""
    name = split_quant(spec)[0]
    if not spec:
        raise HubError("The name of a model is empty; give a path, or a Hub id such as org/name.")
    if not (exists(Path(spec)) or hub.is_repo_id(name) or converter.resolve(name)):
        raise HubError(
            f"{spec!r} is no file or folder here, no Hub id (owner/name) and no published pair; {_hint(name)}"
        )


def _hint(name: str) -> str:
    close = " or ".join(converter.close_names(name))
    return f"did you mean {close}?" if close else "`dflash2 list` shows the pairs."


def published_drafter(target: str) -> str:
    """The drafter that goes with the published pair called `target`; raises HubError if that is none."""
    name = split_quant(target)[0]
    known = converter.resolve(name)
    if known is None:
        raise HubError(f"{target!r} is no published pair, so its drafter must be named too; {_hint(name)}")
    return known.drafter


def _find_target(spec: str, revision: str | None, offline: bool, progress: Progress) -> ModelFile:
    if exists(Path(spec)):
        refuse_revision(spec, revision)
        if Path(spec).is_dir():
            raise GGUFError(f"{spec} is a folder; give the target's GGUF file.")
        return ModelFile(Path(spec), spec, n_parts=read_gguf_info(Path(spec)).integer("split.count") or 1)
    name, quant = split_quant(spec)
    known = converter.resolve(name)
    if known is not None:
        return _published_target(known, quant, revision, offline, progress)
    return _fetch_target(name, quant, revision, offline, progress)


def _published_target(
    known: RegistryEntry, quant: str | None, revision: str | None, offline: bool, progress: Progress
) -> ModelFile:
    owner, name = known.target.split("/")
    repositories = (f"{_GGUF_OWNER}/{name}-GGUF", f"{owner}/{name}-GGUF")
    reasons = []
    for repository in repositories:
        try:
            return _fetch_target(repository, quant, revision, offline, progress)
        except HubError as error:
            reasons.append(str(error))
    raise HubError(f"No GGUF of {known.target} is at hand; give one as TARGET. {' '.join(reasons)}")


def _fetch_target(
    repo_id: str, quant: str | None, revision: str | None, offline: bool, progress: Progress
) -> ModelFile:
    found = hub.resolve_files(
        repo_id,
        lambda names: choose_target(repo_id, names, quant),
        revision=revision,
        offline=offline,
        progress=partial(progress, "fetching the target"),
    )
    return _model_file(found)


def _model_file(found: Snapshot) -> ModelFile:
    return ModelFile(found.files[0].path, found.repo_id or "", found.repo_id, found.revision, len(found.files))


def _find_drafter(spec: str, revision: str | None, offline: bool, progress: Progress) -> ModelFile | Snapshot:
    """A GGUF file, or the checkpoint to convert."""
    if exists(Path(spec)):
        refuse_revision(spec, revision)
        return Snapshot(Path(spec)) if Path(spec).is_dir() else ModelFile(Path(spec), spec)
    name, quant = split_quant(spec)
    known = converter.resolve(name)
    found = _fetch_drafter(known.drafter if known else name, quant, revision, offline, progress)
    return _model_file(found) if found.files[0].name.lower().endswith(".gguf") else found


def _fetch_drafter(
    repo_id: str, quant: str | None, revision: str | None, offline: bool, progress: Progress
) -> Snapshot:
    """A checkpoint if the repository holds one and no quantisation is named, else a GGUF file."""

    def choose(names: Sequence[str]) -> list[str]:
        checkpoint = hub.drafter_files(names)
        if quant is None and any(name.endswith(".safetensors") for name in checkpoint):
            return checkpoint
        return choose_drafter(repo_id, names, quant)

    return hub.resolve_files(
        repo_id, choose, revision=revision, offline=offline, progress=partial(progress, "fetching the drafter")
    )


def _require_convertible(checkpoint: Snapshot) -> None:
    """Raise CheckpointError for what conversion would refuse: that must not come out after fetching the target."""
    if not (checkpoint.path / "config.json").is_file():
        return
    facts = converter.inspect(checkpoint.path).checkpoint
    if facts is not None and facts.reason is not None:
        raise CheckpointError(
            f"{checkpoint.repo_id or checkpoint.path} is not converted as it is: {facts.reason} If that names an"
            " option, run dflash2-convert with it and give the GGUF file."
        )


def _converted(
    checkpoint: Snapshot, target: ModelFile, outtype: str, overrides: Overrides, progress: Progress
) -> tuple[ModelFile, tuple[str, ...]]:
    """The converted drafter: from the cache if it was converted before, else written there."""
    label = checkpoint.repo_id or str(checkpoint.path)
    name = (checkpoint.repo_id or checkpoint.path.resolve().name).rsplit("/", 1)[-1].removeprefix("dflash-")
    short = name.encode(errors="replace")[:_NAME_BYTES].decode(errors="ignore")
    key = _key(checkpoint, target, outtype, overrides)
    output = cache_folder(_CACHE) / f"dflash-{short}-{outtype.upper()}-{key}.gguf"
    notes: tuple[str, ...] = ()
    with FileLock(output.with_suffix(".lock")):
        if not output.is_file():
            source = Snapshot(target.path, target.repo_id, target.revision)
            done = converter.convert(
                checkpoint,
                source,
                output,
                outtype=outtype,
                overrides=overrides,
                progress=partial(progress, "converting the drafter"),
            )
            notes = done.notes
    return ModelFile(output, label, checkpoint.repo_id, checkpoint.revision), notes


@system_errors(GGUFError)
def _key(checkpoint: Snapshot, target: ModelFile, outtype: str, overrides: Overrides) -> str:
    """What a converted file follows from: the checkpoint, the target's header, and how it is converted."""
    digest = hashlib.sha256(repr((__version__, outtype.lower(), overrides)).encode())
    if checkpoint.repo_id:
        digest.update(f"{checkpoint.repo_id}@{checkpoint.revision}".encode())
    else:
        files = [path for path in checkpoint.path.rglob("*") if path.is_file()]
        for name in hub.drafter_files(sorted(path.relative_to(checkpoint.path).as_posix() for path in files)):
            digest.update(f"{name} {sha256_file(checkpoint.path / name)}".encode())
    info = read_gguf_info(target.path)
    header_bytes = min((tensor.offset for tensor in info.tensors), default=target.path.stat().st_size)
    with target.path.open("rb") as file:
        digest.update(file.read(header_bytes))
    return digest.hexdigest()[:_KEY_LENGTH]


def refuse_revision(spec: str, revision: str | None) -> None:
    """Raise HubError if a revision is asked of a local path."""
    if revision is not None:
        raise HubError(f"A revision ({revision}) is given, but {spec} is a local path; leave it out.")


def no_progress(what: str, done: int, total: int) -> None:
    """For callers that do not ask."""
