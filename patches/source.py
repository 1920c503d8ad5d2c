"""llama.cpp's source, out of the pinned llama-cpp-python sdist."""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from filelock import FileLock

from dflash2.cache import cache_folder
from dflash2.constants import (
    LLAMA_CPP_COMMIT,
    LLAMA_CPP_PYTHON_VERSION,
    SDIST_NAME,
    SDIST_SHA256,
    SDIST_SOURCE_FOLDER,
)
from dflash2.errors import BuildError


def source() -> Path:
    """Folder of llama.cpp's pinned source; the first call downloads 77 MB through pip and unpacks 176 MB.

    Processes that call it at the same time wait for the first. Raises BuildError if pip cannot fetch the sdist or its
    SHA-256 is not the pinned one.
    """
    sources = cache_folder("sources")
    folder = sources / f"llama.cpp-{LLAMA_CPP_COMMIT}"
    with FileLock(sources / f"{folder.name}.lock"):
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(dir=sources) as scratch:
                sdist = _download(Path(scratch))
                # Renamed into place when complete: the folder's existence is the proof that it is whole.
                unpack(sdist, Path(scratch)).rename(folder)
    return folder


def _download(folder: Path) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise BuildError(f"{sys.executable} has no pip to fetch {SDIST_NAME} with; run: python -m ensurepip")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
    # Of this package alone no wheel: the tools that pip needs to read an sdist's metadata still come as wheels.
    command += ["--no-binary", "llama-cpp-python", "--dest", str(folder)]
    command += [f"llama-cpp-python=={LLAMA_CPP_PYTHON_VERSION}"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    sdist = folder / SDIST_NAME
    if result.returncode or not sdist.is_file():
        raise BuildError(f"pip could not fetch {SDIST_NAME}: {result.stderr.strip()[-500:]}")
    return sdist


def unpack(sdist: Path, folder: Path) -> Path:
    """Unpack llama.cpp out of `sdist` into `folder` and return where it is; raises BuildError on any other sdist."""
    with sdist.open("rb") as file:
        digest = hashlib.sha256()
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    if digest.hexdigest() != SDIST_SHA256:
        raise BuildError(
            f"{sdist.name} has SHA-256 {digest.hexdigest()}, but the pinned one is {SDIST_SHA256}; "
            "the package index serves another file."
        )
    try:
        with tarfile.open(sdist) as archive:
            # Python before 3.10.12 has no filters; source_files is as strict.
            archive.extraction_filter = getattr(tarfile, "data_filter", None)
            archive.extractall(folder, members=source_files(archive))
    except OSError as error:
        raise BuildError(f"Cannot unpack {sdist.name} into {folder}: {error}; 176 MB are needed there.") from error
    return folder / SDIST_SOURCE_FOLDER


def source_files(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Regular files below llama.cpp's folder: neither links nor names that lead elsewhere."""
    for member in archive:
        path = PurePosixPath(member.name)
        inside = path.is_relative_to(SDIST_SOURCE_FOLDER) and ".." not in path.parts
        # The .git file points into the sdist's own repository, which is left out.
        if inside and member.isreg() and path.name != ".git":
            yield member
