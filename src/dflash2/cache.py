"""Where things that can be made again are kept: sources and builds of llama.cpp, generated models."""

import os
from pathlib import Path

import platformdirs

from dflash2.errors import OutputError

CACHE_VARIABLE = "DFLASH2_CACHE"


def cache_path(name: str) -> Path:
    """Folder `name` of the cache, whether it is there or not.

    The cache is `$DFLASH2_CACHE`, else the platform's cache folder for llama-dflash2 (`~/.cache/llama-dflash2` on
    Linux).
    """
    root = os.environ.get(CACHE_VARIABLE) or platformdirs.user_cache_dir("llama-dflash2", appauthor=False)
    return Path(root).expanduser().absolute() / name


def cache_folder(name: str) -> Path:
    """Folder `name` of the cache, made if it is not there; raises OutputError if it cannot be made or written to."""
    folder = cache_path(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(
            f"Cannot make the cache folder {folder}: {error.strerror}; set {CACHE_VARIABLE} to a writable folder."
        ) from error
    if not os.access(folder, os.W_OK):
        raise OutputError(f"The cache folder {folder} is not writable; set {CACHE_VARIABLE} to one that is.")
    return folder
