"""Which llama.cpp library to load, and why."""

from __future__ import annotations

import ctypes
import os
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from dflash2.builds import library_builds, library_file
from dflash2.constants import LLAMA_CPP_PYTHON_VERSION
from dflash2.errors import NativeError

# "stock", or a folder with a libllama; unset for the best patched build, else stock.
LIBRARY_VARIABLE = "DFLASH2_LIBRARY"
# llama_cpp's own, which it reads once, when it is first imported.
LLAMA_CPP_VARIABLE = "LLAMA_CPP_LIB_PATH"
_STOCK = "stock"


@dataclass(frozen=True)
class Choice:
    """`folder` of the library that llama_cpp is to load, None to leave that to it, and the `reason` in words."""

    folder: Path | None
    reason: str


def choose() -> Choice:
    """Choose the library; raises NativeError if a variable that decides it names a folder that has none."""
    wanted = os.environ.get(LIBRARY_VARIABLE, "")
    if "llama_cpp.llama_cpp" in sys.modules:
        return Choice(None, "llama_cpp was imported before dflash2, so the library that it had loaded stays")
    if os.environ.get(LLAMA_CPP_VARIABLE):
        _existing(LLAMA_CPP_VARIABLE, "unset it, or name another")
        return Choice(None, f"{LLAMA_CPP_VARIABLE} names it")
    if wanted == _STOCK:
        return Choice(None, f"{LIBRARY_VARIABLE} is {_STOCK}")
    if wanted:
        return Choice(_existing(LIBRARY_VARIABLE, "name another, or stock"), f"{LIBRARY_VARIABLE} names it")
    return _best_build()


def _existing(variable: str, advice: str) -> Path:
    """The folder that the variable names; raises NativeError if there is no library in it."""
    folder = Path(os.environ[variable]).expanduser()
    if library_file(folder) is None:
        raise NativeError(f"{variable} is {os.environ[variable]!r}, a folder without libllama; {advice}.")
    return folder


def _best_build() -> Choice:
    try:
        installed = version("llama-cpp-python")
    except PackageNotFoundError:
        return Choice(None, "llama-cpp-python is not installed")
    builds = library_builds()
    if not builds:
        return Choice(None, "there is no patched build for this machine; `dflash2 build` makes one")
    if installed != LLAMA_CPP_PYTHON_VERSION:
        return Choice(None, f"patched builds are for llama-cpp-python {LLAMA_CPP_PYTHON_VERSION}, not {installed}")
    for build in builds:
        problem = _problem(build.libraries)
        if not problem:
            return Choice(build.libraries, f"it is the best patched build here ({build.backend}, key {build.key})")
    return Choice(None, f"the patched build {builds[0].key} cannot be loaded ({_problem(builds[0].libraries)})")


def _problem(folder: Path) -> str:
    """Why the library in `folder` cannot be loaded, "" if it can: a GPU's may lack its driver."""
    file = library_file(folder)
    try:
        ctypes.CDLL(str(file))
    except OSError as error:
        return str(error)
    return ""
