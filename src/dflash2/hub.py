"""The one gate to the Hub: an id becomes a folder with only the files that are needed, at a known commit, checked.

Cache, token (HF_TOKEN or the login), endpoint (HF_ENDPOINT) and the resuming of broken downloads are those of
huggingface_hub. Nothing is asked of the network before an id is well formed, nor when a local path has that name.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from dflash2.errors import CheckpointError, HubError
from dflash2.hashing import sha256_file
from dflash2.model_card import CARD, license_of, read_card
from dflash2.regular_file import exists

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoSibling

Progress = Callable[[int, int], None]
_Choose = Callable[[Sequence[str]], list[str]]

# What a drafter consists of. No *.bin: those are pickles (the mask embedding is read without unpickling).
_DRAFTER_FILES = ("config.json", "hf_quant_config.json", "*.safetensors", "*.safetensors.index.json")
_BESIDE_WEIGHTS = ("mask_embedding.pt", ".hf_metadata/config.json")
# Where exports put it: MiMo beside the weights of the target (so it goes first), NeMo below a training step.
_DRAFTER_FOLDERS = ("dflash", ".", "model/consolidated", "consolidated", "model")
# A target lends its tokenizer and its sizes: never its weights.
# fmt: off
_TARGET_FILES = (
    "config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tokenizer.model.v*",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "spiece.model",
    "sentencepiece.bpe.model", "*.tiktoken", "tekken.json", "chat_template.jinja", "chat_template.json",
)
# fmt: on
_REPO_ID = re.compile(r"(?P<org>[A-Za-z0-9][\w.-]*)/(?P<name>[A-Za-z0-9][\w.-]*)", re.ASCII)
_MAX_ID = 96
_TIMEOUT_SECONDS = 30.0
# What releases of huggingface_hub talk through; their errors come through it as they are.
_HTTP_LIBRARIES = ("httpx", "httpx2", "requests", "urllib3")


@dataclass(frozen=True)
class HubFile:
    """One file: `name` inside the repository, `path` here; `sha256` as the Hub states it (large files), else None."""

    name: str
    path: Path
    sha256: str | None = None


@dataclass(frozen=True)
class Snapshot:
    """Where a model is on this disk; `repo_id` and `revision` (the resolved commit) are None for a local one.

    `license` is the identifier in the model card, None if it has none.
    """

    path: Path
    repo_id: str | None = None
    revision: str | None = None
    license: str | None = None
    files: tuple[HubFile, ...] = field(default=(), repr=False)


def resolve_drafter(
    spec: str | Path, *, revision: str | None = None, offline: bool = False, progress: Progress | None = None
) -> Snapshot:
    """The drafter checkpoint `spec`: an existing local path as it is, else the Hub id `org/name`, downloaded.

    Args:
        spec: local path or Hub id; a path that exists wins.
        revision: branch, tag or commit; the default branch if None.
        offline: take everything from the cache (so does HF_HUB_OFFLINE=1).
        progress: called with (bytes here, bytes in all).

    Raises HubError, one sentence for every way this can fail.
    """
    return _resolve(spec, _drafter_files, revision, offline, progress)


def resolve_target(
    spec: str | Path, *, revision: str | None = None, offline: bool = False, progress: Progress | None = None
) -> Snapshot:
    """The target `spec`: a local GGUF or folder as it is, else config and tokenizer files (no weights) of a Hub id.

    Arguments and errors as `resolve_drafter`.
    """
    return _resolve(spec, _target_files, revision, offline, progress)


def is_repo_id(text: str) -> bool:
    """Whether `text` is spelled like a Hub id, `org/name`."""
    match = _REPO_ID.fullmatch(text)
    if match is None or len(text) > _MAX_ID or "--" in text or ".." in text:
        return False
    return not any(part.endswith((".", "-")) for part in match.groups()) and not text.endswith(".git")


def _resolve(
    spec: str | Path, choose: _Choose, revision: str | None, offline: bool, progress: Progress | None
) -> Snapshot:
    if spec == "":
        raise HubError("The name of a model is empty; give a path, or a Hub id such as org/name.")
    path = Path(spec)
    text = path.as_posix() if isinstance(spec, Path) else spec
    if exists(path):
        if revision is not None:
            raise HubError(f"A revision ({revision}) is given, but {spec} is a local path; leave it out.")
        return Snapshot(path)
    if not is_repo_id(text):
        raise HubError(f"{text!r} is neither a path that exists nor a Hub id; give a path, or an id such as org/name.")
    from huggingface_hub import constants

    try:
        if offline or constants.HF_HUB_OFFLINE:
            return _from_cache(text, choose, revision)
        return _download(text, choose, revision, progress or _no_progress)
    except HubError:
        raise
    except Exception as error:
        translated = _translate(error, text, revision)
        if translated is None:
            raise
        raise translated from error


def _drafter_files(names: Sequence[str]) -> list[str]:
    """The files of the first folder with weights, and the config.json and card at the top."""
    for folder in _DRAFTER_FOLDERS:
        found = _matching(names, [str(PurePosixPath(folder, file)) for file in (*_DRAFTER_FILES, *_BESIDE_WEIGHTS)])
        if any(name.endswith(".safetensors") for name in found):
            chosen = {*found, *_matching(names, ("config.json", CARD))}
            return [name for name in names if name in chosen]
    return _matching(names, (*_DRAFTER_FILES, CARD))


def _target_files(names: Sequence[str]) -> list[str]:
    return _matching(names, _TARGET_FILES)


def _matching(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    """Names that fit a pattern of the same folder: `*` does not cross a slash."""
    wanted = [PurePosixPath(pattern) for pattern in patterns]
    return [
        name
        for name in names
        if any(
            PurePosixPath(name).parent == pattern.parent and fnmatchcase(PurePosixPath(name).name, pattern.name)
            for pattern in wanted
        )
    ]


def _from_cache(repo_id: str, choose: _Choose, revision: str | None) -> Snapshot:
    from huggingface_hub import snapshot_download

    # The pattern asks for what every model has: the rest of the repository need not be here.
    folder = Path(
        snapshot_download(repo_id, revision=revision, local_files_only=True, allow_patterns=["*config.json", CARD])
    )
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    chosen = choose(names)
    _require_config(repo_id, chosen, names, "in the cache; run once without --offline")
    return _snapshot(repo_id, folder, [HubFile(name, folder / name, _blob_sha256(folder / name)) for name in chosen])


def _blob_sha256(path: Path) -> str | None:
    """The cache names the blob of a large file by its SHA-256, that of a small one by a shorter git hash."""
    name = path.resolve().name
    return name if re.fullmatch(r"[0-9a-f]{64}", name) else None


def _download(repo_id: str, choose: _Choose, revision: str | None, progress: Progress) -> Snapshot:
    from huggingface_hub import HfApi

    info = HfApi().model_info(repo_id, revision=revision, files_metadata=True, timeout=_TIMEOUT_SECONDS)
    commit = info.sha
    if not commit:
        raise HubError(f"The Hub names no commit for {repo_id}; try again later.")
    siblings = {sibling.rfilename: sibling for sibling in info.siblings or ()}
    for name in siblings:
        _refuse_escape(repo_id, name)
    names = choose(list(siblings))
    _require_config(repo_id, names, list(siblings), "on the Hub; give the id of another repository")
    total = sum(siblings[name].size or 0 for name in names)
    files: list[HubFile] = []
    done = 0
    for name in names:
        # One file is asked for by the name of the revision, so that the cache knows it when offline.
        asked = revision if not files else commit
        meter = _Meter(done, total, progress)
        files.append(_download_file(repo_id, siblings[name], asked, commit, meter))
        done += siblings[name].size or 0
        progress(done, total)
    folder = files[0].path.parents[len(PurePosixPath(names[0]).parts) - 1]
    return _snapshot(repo_id, folder, files)


def _download_file(repo_id: str, sibling: RepoSibling, revision: str | None, commit: str, meter: _Meter) -> HubFile:
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    name = sibling.rfilename
    was_here = isinstance(try_to_load_from_cache(repo_id, name, revision=commit), str)
    path = Path(hf_hub_download(repo_id, name, revision=revision, **meter.options()))
    if commit not in path.parts:
        raise HubError(f"{repo_id} changed on the Hub during the download; run it again.")
    stated = sibling.lfs.sha256 if sibling.lfs else None
    if stated and not was_here and sha256_file(path) != stated:
        path.resolve().unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        raise HubError(
            f"{name} of {repo_id} arrived with another SHA-256 than the Hub states ({stated}); it was removed, run it"
            " again."
        )
    return HubFile(name, path, stated)


def _snapshot(repo_id: str, folder: Path, files: Sequence[HubFile]) -> Snapshot:
    return Snapshot(folder, repo_id, folder.name, read_license(folder), tuple(files))


def read_license(folder: Path) -> str | None:
    """Licence identifier in the model card of `folder`; None if it has none or cannot be read."""
    try:
        return license_of(read_card(folder))
    except CheckpointError:
        return None


def _refuse_escape(repo_id: str, name: str) -> None:
    """A file name must stay inside the folder it is put into, on every platform: even one that is not wanted."""
    drive = re.match(r"[A-Za-z]:", name)
    if drive or "\\" in name or "\0" in name or any(part in ("", ".", "..") for part in name.split("/")):
        raise HubError(f"{repo_id} holds a file named {name!r}, which could leave its folder; nothing was downloaded.")


def _require_config(repo_id: str, chosen: Sequence[str], names: Sequence[str], where: str) -> None:
    if any(PurePosixPath(name).name == "config.json" for name in chosen):
        return
    if any(name.endswith(".gguf") for name in names):
        raise HubError(f"{repo_id} has GGUF files and no config.json; download one of them and give its path.")
    raise HubError(f"{repo_id} has no config.json {where}.")


def _no_progress(done: int, total: int) -> None:
    """For callers that do not ask."""


class _Meter:
    """Bytes of one file, reported on top of those before it."""

    def __init__(self, before: int, total: int, progress: Progress) -> None:
        self._done = before
        self._total = total
        self._progress = progress

    def add(self, count: int) -> None:
        """Report `count` more bytes."""
        self._done += count
        self._progress(min(self._done, self._total), self._total)

    def options(self) -> dict[str, Any]:
        """Arguments for `hf_hub_download`; its releases before 1.0 take no class, so they report whole files only."""
        from huggingface_hub import hf_hub_download

        if "tqdm_class" not in inspect.signature(hf_hub_download).parameters:
            return {}
        return {"tqdm_class": type("Bar", (_Bar,), {"meter": self})}


class _Bar:
    """Stands in for the progress bar that the library would show."""

    meter: _Meter

    def __init__(self, *_: object, total: float | None = None, initial: float = 0, **__: object) -> None:
        self.n, self.total = 0.0, total
        self.update(initial)

    def update(self, count: float | None = 1) -> None:
        self.n += count or 0
        self.meter.add(int(count or 0))

    def update_transfer(self, count: float | None = 1) -> None:
        """Bytes on the wire, which compression and deduplication change: not reported."""

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Whatever else is called on a bar (close, refresh, set_postfix_str)."""
        return lambda *_, **__: None


def _translate(error: Exception, repo_id: str, revision: str | None) -> HubError | None:
    """Our one sentence for an error of the library; None for one that is not about the Hub."""
    from huggingface_hub import constants, errors

    where = f"{repo_id} at revision {revision!r}" if revision else repo_id
    cached = f"Nothing of {where} is in the cache {constants.HF_HUB_CACHE}; run once without --offline and"
    # The order matters: the later classes are bases of the earlier ones.
    sentences: tuple[tuple[type[Exception], str], ...] = (
        (
            errors.GatedRepoError,
            f"{repo_id} is gated; accept its terms on the Hub, then log in with `hf auth login` or set HF_TOKEN.",
        ),
        (errors.DisabledRepoError, f"The Hub has disabled {repo_id}; use another source of this model."),
        (
            errors.RepositoryNotFoundError,
            f"The Hub has no model {repo_id}, or it is private; check the spelling, or log in with `hf auth login`.",
        ),
        (errors.RevisionNotFoundError, f"{repo_id} has no revision {revision!r}; give a branch, tag or commit of it."),
        (errors.OfflineModeIsEnabled, f"{cached} with HF_HUB_OFFLINE unset."),
    )
    for kind, sentence in sentences:
        if isinstance(error, kind):
            return HubError(sentence)
    if isinstance(error, errors.LocalEntryNotFoundError):
        cause = error.__cause__
        inner = _translate(cause, repo_id, revision) if isinstance(cause, Exception) else None
        return inner or HubError(f"{cached} with HF_HUB_OFFLINE unset.")
    if isinstance(error, errors.HfHubHTTPError):
        return HubError(_status_sentence(error.response.status_code, repo_id))
    if type(error).__module__.partition(".")[0] in _HTTP_LIBRARIES or isinstance(
        error, (ConnectionError, TimeoutError)
    ):
        return HubError(
            f"The connection to the Hub ({constants.ENDPOINT}) failed ({type(error).__name__}); check the network and"
            " run it again, or use what is in the cache with --offline."
        )
    if isinstance(error, OSError) and error.strerror:
        return HubError(
            f"Cannot keep the download of {repo_id} in {constants.HF_HUB_CACHE}: {error.strerror}; make room and run it"
            " again, or set HF_HUB_CACHE to another folder."
        )
    return HubError(f"A file of {repo_id} arrived incomplete; run it again.") if isinstance(error, OSError) else None


def _status_sentence(status: int, repo_id: str) -> str:
    if status in (401, 403):
        return f"The Hub refused access to {repo_id} (status {status}); log in with `hf auth login` or set HF_TOKEN."
    if status == 429:
        return f"The Hub limits requests (status 429) and did not give {repo_id}; wait a few minutes and run it again."
    return f"The Hub answered with status {status} for {repo_id}; run it again later, or use --offline."
