"""Files of a pair from the Hub, chosen by name or pattern as `Llama.from_pretrained` chooses them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from dflash2.errors import PretrainedError

if TYPE_CHECKING:
    from huggingface_hub import HfApi


@dataclass(frozen=True)
class HubFolders:
    """Where downloads go: `local_dir` as plain files, else the cache (`cache_dir`, by default huggingface_hub's)."""

    local_dir: str | PathLike[str] | None = None
    cache_dir: str | PathLike[str] | None = None


def download(repo_id: str, filename: str, others: Sequence[str], folders: HubFolders) -> Path:
    """Download the one file of `repo_id` that matches `filename`, and one for each of `others`; returns its path.

    Patterns are those of `fnmatch`. Raises PretrainedError if a pattern matches no file or several, and what
    huggingface_hub raises.
    """
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        raise PretrainedError("from_pretrained needs huggingface_hub; install it.") from error
    api = HfApi()
    names = [sibling.rfilename for sibling in api.model_info(repo_id).siblings or ()]
    chosen = [_only(repo_id, names, pattern) for pattern in (filename, *others)]
    paths = [_fetch(api, repo_id, name, folders) for name in chosen]
    return paths[0]


def _only(repo_id: str, names: Sequence[str], pattern: str) -> str:
    found = [name for name in names if fnmatch(name, pattern)]
    if len(found) != 1:
        listed = ", ".join(found or [name for name in names if name.endswith(".gguf")]) or "no GGUF at all"
        what = f"{len(found)} files match" if found else "no file matches"
        raise PretrainedError(f"{repo_id}: {what} {pattern!r}; name one of: {listed}.")
    return found[0]


def _fetch(api: HfApi, repo_id: str, name: str, folders: HubFolders) -> Path:
    local_dir, cache_dir = (
        None if folder is None else Path(folder) for folder in (folders.local_dir, folders.cache_dir)
    )
    return Path(api.hf_hub_download(repo_id, name, local_dir=local_dir, cache_dir=cache_dir))
