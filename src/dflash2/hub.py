"""The one gate to the Hub: an id becomes a folder with only the files that are needed, at a known commit, checked.

Cache, token (HF_TOKEN or the login), endpoint (HF_ENDPOINT) and the resuming of broken downloads are those of
huggingface_hub. Nothing is asked of the network before an id is well formed, nor when a local path has that name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from dflash2.errors import CheckpointError, HubError, PretrainedError
from dflash2.hashing import sha256_file
from dflash2.hub_errors import translated
from dflash2.hub_progress import Meter, Progress, no_progress
from dflash2.model_card import CARD, license_of, read_card
from dflash2.regular_file import exists

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoSibling

Choose = Callable[[Sequence[str]], list[str]]

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


@dataclass(frozen=True)
class HubFolders:
    """Where downloads go: `local_dir` as plain files, else the cache (`cache_dir`, by default huggingface_hub's).

    `repo_type`: the part of the Hub they come from, "model" or "dataset", which the cache keeps apart.
    """

    local_dir: Path | None = None
    cache_dir: Path | None = None
    repo_type: str = "model"


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
    return _resolve(spec, drafter_files, revision, offline, progress)


def resolve_target(
    spec: str | Path, *, revision: str | None = None, offline: bool = False, progress: Progress | None = None
) -> Snapshot:
    """The target `spec`: a local GGUF or folder as it is, else config and tokenizer files (no weights) of a Hub id.

    Arguments and errors as `resolve_drafter`.
    """
    return _resolve(spec, _target_files, revision, offline, progress)


def resolve_files(
    repo_id: str,
    choose: Choose,
    *,
    revision: str | None = None,
    offline: bool = False,
    progress: Progress | None = None,
) -> Snapshot:
    """The files of `repo_id` that `choose` picks: it gets the names in the repository (offline: those in the cache).

    Arguments and errors as `resolve_drafter`; what `choose` raises comes through.
    """
    if not is_repo_id(repo_id):
        raise HubError(f"{repo_id!r} is no Hub id; give one such as org/name.")
    from huggingface_hub import constants

    with translated(repo_id, revision):
        if offline or constants.HF_HUB_OFFLINE:
            return _from_cache(repo_id, choose, revision)
        return _snapshot(repo_id, *_download_files(repo_id, choose, revision, progress or no_progress, HubFolders()))


def fetch_files(
    repo_id: str, patterns: Sequence[str], folders: HubFolders = HubFolders(), *, besides: Sequence[str] = ()
) -> list[HubFile]:
    """The one file of `repo_id` that fits each of `patterns` (names, or those of `fnmatch`), downloaded at one commit.

    Files named in `besides` are left out of account, but where one is asked for by its name.
    With HF_HUB_OFFLINE=1 they are taken from the cache. Raises PretrainedError if a pattern fits no file or several,
    else HubError.
    """
    if not isinstance(repo_id, str) or not is_repo_id(repo_id):
        raise HubError(f"{repo_id!r} is no Hub id; give one such as org/name.")

    def choose(names: Sequence[str]) -> list[str]:
        others = [name for name in names if name not in besides]
        return [pattern if pattern in names else _only(repo_id, others, pattern) for pattern in patterns]

    from huggingface_hub import constants, snapshot_download

    with translated(repo_id, None):
        if constants.HF_HUB_OFFLINE:
            cached = folders.local_dir or Path(
                snapshot_download(repo_id, cache_dir=folders.cache_dir, local_files_only=True)
            )
            return [HubFile(name, cached / name) for name in choose(_names_below(cached))]
        return _download_files(repo_id, choose, None, no_progress, folders)[1]


def fetch_dataset_file(repo_id: str, choose: Callable[[Sequence[str]], str]) -> HubFile:
    """The file of the data set `repo_id` that `choose` names; offline from the cache. Raises HubError, and its own."""
    if not is_repo_id(repo_id):
        raise HubError(f"{repo_id!r} is no Hub id; give one such as org/name.")
    from huggingface_hub import constants, snapshot_download

    with translated(repo_id, None):
        if constants.HF_HUB_OFFLINE:
            cached = Path(snapshot_download(repo_id, repo_type="dataset", local_files_only=True))
            name = choose(_names_below(cached))
            return HubFile(name, cached / name)
        folders = HubFolders(repo_type="dataset")
        return _download_files(repo_id, lambda names: [choose(names)], None, no_progress, folders)[1][0]


def _only(repo_id: str, names: Sequence[str], pattern: str) -> str:
    found = [name for name in names if fnmatchcase(name, pattern)]
    if len(found) != 1:
        listed = ", ".join(found or [name for name in names if name.endswith(".gguf")]) or "no GGUF at all"
        what = f"{len(found)} files match" if found else "no file matches"
        raise PretrainedError(f"{repo_id}: {what} {pattern!r}; name one of: {listed}.")
    return found[0]


def is_repo_id(text: str) -> bool:
    """Whether `text` is spelled like a Hub id, `org/name`."""
    match = _REPO_ID.fullmatch(text)
    if match is None or len(text) > _MAX_ID or "--" in text or ".." in text:
        return False
    return not any(part.endswith((".", "-")) for part in match.groups()) and not text.endswith(".git")


def _resolve(
    spec: str | Path, choose: Choose, revision: str | None, offline: bool, progress: Progress | None
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

    cached = offline or constants.HF_HUB_OFFLINE
    where = "in the cache; run once without --offline" if cached else "on the Hub; give the id of another repository"

    def choose_with_config(names: Sequence[str]) -> list[str]:
        chosen = choose(names)
        _require_config(text, chosen, names, where)
        return chosen

    return resolve_files(text, choose_with_config, revision=revision, offline=offline, progress=progress)


def drafter_files(names: Sequence[str]) -> list[str]:
    """Of a repository's `names`, a drafter's: the first folder with weights, and config.json and card at the top."""
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


def _from_cache(repo_id: str, choose: Choose, revision: str | None) -> Snapshot:
    from huggingface_hub import snapshot_download

    # The pattern asks for what every model has: the rest of the repository need not be here.
    folder = Path(
        snapshot_download(repo_id, revision=revision, local_files_only=True, allow_patterns=["*config.json", CARD])
    )
    chosen = choose(_names_below(folder))
    return _snapshot(repo_id, folder, [HubFile(name, folder / name, _blob_sha256(folder / name)) for name in chosen])


def _names_below(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def _blob_sha256(path: Path) -> str | None:
    """The cache names the blob of a large file by its SHA-256, that of a small one by a shorter git hash."""
    name = path.resolve().name
    return name if re.fullmatch(r"[0-9a-f]{64}", name) else None


def _download_files(
    repo_id: str, choose: Choose, revision: str | None, progress: Progress, folders: HubFolders
) -> tuple[Path, list[HubFile]]:
    """The chosen files, and the folder that their names start from."""
    from huggingface_hub import HfApi

    ask = HfApi().dataset_info if folders.repo_type == "dataset" else HfApi().model_info
    info = ask(repo_id, revision=revision, files_metadata=True, timeout=_TIMEOUT_SECONDS)
    commit = info.sha
    if not commit:
        raise HubError(f"The Hub names no commit for {repo_id}; try again later.")
    siblings = {sibling.rfilename: sibling for sibling in info.siblings or ()}
    for name in siblings:
        _refuse_escape(repo_id, name)
    names = choose(list(siblings))
    total = sum(siblings[name].size or 0 for name in names)
    files: list[HubFile] = []
    done = 0
    for name in names:
        # One file is asked for by the name of the revision, so that the cache knows it when offline.
        asked = revision if not files else commit
        meter = Meter(done, total, progress)
        files.append(_download_file(repo_id, siblings[name], asked, commit, meter, folders))
        done += siblings[name].size or 0
        progress(done, total)
    return files[0].path.parents[len(PurePosixPath(names[0]).parts) - 1], files


def _download_file(
    repo_id: str, sibling: RepoSibling, revision: str | None, commit: str, meter: Meter, folders: HubFolders
) -> HubFile:
    from huggingface_hub import hf_hub_download

    name = sibling.rfilename
    before = _state_of(repo_id, name, commit, folders)
    where: dict[str, Any] = vars(folders)
    path = Path(hf_hub_download(repo_id, name, revision=revision, **where, **meter.options()))
    if folders.local_dir is None and commit not in path.parts:
        raise HubError(f"{repo_id} changed on the Hub during the download; run it again.")
    stated = sibling.lfs.sha256 if sibling.lfs else None
    is_new = before is None or before != _state_of(repo_id, name, commit, folders)
    if stated and is_new and sha256_file(path) != stated:
        path.resolve().unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        raise HubError(
            f"{name} of {repo_id} arrived with another SHA-256 than the Hub states ({stated}); it was removed, run it"
            " again."
        )
    return HubFile(name, path, stated)


def _state_of(repo_id: str, name: str, commit: str, folders: HubFolders) -> tuple[int, int] | None:
    """What changes when the file is downloaded anew; None if it is not here."""
    from huggingface_hub import try_to_load_from_cache

    if folders.local_dir is not None:
        path = folders.local_dir / name
    else:
        where: dict[str, Any] = {"cache_dir": folders.cache_dir, "repo_type": folders.repo_type}
        cached = try_to_load_from_cache(repo_id, name, revision=commit, **where)
        if not isinstance(cached, str):
            return None
        path = Path(cached)
    if not path.is_file():
        return None
    status = path.stat()
    return status.st_mtime_ns, status.st_size


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
