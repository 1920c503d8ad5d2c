"""Finds the llama.cpp library, the symbols in it, and what makes it unfit."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dflash2.constants import LLAMA_CPP_PYTHON_VERSION, PATCHED_ABI_VERSION
from dflash2.errors import NativeError
from dflash2.native.choice import LIBRARY_VARIABLE, LLAMA_CPP_VARIABLE, choose
from dflash2.native.symbols import SYMBOLS


@dataclass(frozen=True)
class Library:
    """The llama.cpp library in use.

    Attributes:
        path: the file.
        patched: whether it has the C interface of a patched build.
        reason: why it is this one, in words.
        imported_before: whether llama_cpp had loaded it before dflash2 could choose.
    """

    path: Path
    patched: bool
    reason: str
    imported_before: bool


@cache
def llama() -> tuple[Any, Library]:
    """The module `llama_cpp.llama_cpp` with its library loaded."""
    imported_before = "llama_cpp.llama_cpp" in sys.modules
    choice = choose()
    try:
        module = _import_with(choice.folder)
    except (ImportError, RuntimeError, OSError) as error:
        raise NativeError(
            f"llama-cpp-python cannot be loaded ({error}); install llama-cpp-python {LLAMA_CPP_PYTHON_VERSION}."
        ) from error
    version_of = getattr(module._lib, "dflash2_abi_version", None)
    patched = version_of is not None and version_of() == PATCHED_ABI_VERSION
    loaded = Library(Path(module._lib._name), patched, choice.reason, imported_before)
    _check_layout(module, loaded)
    return module, loaded


def _import_with(folder: Path | None) -> Any:
    """Import llama_cpp with the library in `folder`; its variable is set for no longer than that."""
    if folder is None:
        return import_module("llama_cpp.llama_cpp")
    os.environ[LLAMA_CPP_VARIABLE] = str(folder)
    try:
        return import_module("llama_cpp.llama_cpp")
    finally:
        del os.environ[LLAMA_CPP_VARIABLE]


# Values that every llama.cpp puts there: read at another offset, by the structure of another version, they differ.
_DEFAULTS = {
    "llama_context_default_params": {
        "n_ctx": 512,
        "n_batch": 2048,
        "n_ubatch": 512,
        "n_rs_seq": 0,
        "type_k": 1,
        "type_v": 1,
        "swa_full": 1,
        "ctx_other": 0,
    },
    "llama_model_default_params": {"devices": 0, "split_mode": 1, "main_gpu": 0, "use_extra_bufts": 1, "no_alloc": 0},
}


def _check_layout(module: Any, loaded: Library) -> None:
    """Refuse a library whose parameter structures are not those that llama_cpp declares: using it would crash."""
    for make, expected in _DEFAULTS.items():
        params = getattr(module, make)()
        found = {name: int(getattr(params, name, -1) or 0) for name in expected}
        if found != expected:
            wrong = next(name for name in expected if found[name] != expected[name])
            raise NativeError(
                f"{loaded.path} is of another version than llama-cpp-python {version('llama-cpp-python')}: its {make} "
                f"gives {wrong} = {found[wrong]}, not {expected[wrong]}; unset {LLAMA_CPP_VARIABLE} and "
                f"{LIBRARY_VARIABLE}, or build the library for this version."
            )


def library() -> Library:
    """Load llama.cpp if need be and say which library is in use; raises NativeError if there is none."""
    return llama()[1]


@cache
def function(name: str) -> Any:
    """A function of `llama-ext.h` under one of its names: the plain one where the library has our C interface."""
    module, loaded = llama()
    symbol = SYMBOLS[name]
    for exported in symbol.names if loaded.patched else symbol.names[1:]:
        found = getattr(module._lib, exported, None)
        if found is not None:
            found.restype, found.argtypes = symbol.result, list(symbol.arguments)
            return found
    raise NativeError(
        f"{loaded.path} (llama-cpp-python {version('llama-cpp-python')}) does not export {name}, which DFlash needs; "
        f"install llama-cpp-python {LLAMA_CPP_PYTHON_VERSION}."
    )


def lattice_layout() -> int:
    """How the library lays out the selector's rows (`dflash2_lattice_layout` in dflash2.h); 1 is upstream's."""
    module, loaded = llama()
    return int(module._lib.dflash2_lattice_layout()) if loaded.patched else 1


def require_symbols() -> None:
    """Raise NativeError, naming the first one missing, unless the library exports every symbol DFlash needs."""
    for name in SYMBOLS:
        function(name)


def silence() -> None:
    """Keep llama.cpp's log to errors, as `Llama(verbose=False)` does."""
    llama()
    import_module("llama_cpp._logger").set_verbose(False)


@cache
def repacking_is_safe() -> bool:
    """Whether weights may be kept in the CPU backend's own layouts (llama.cpp's `use_extra_bufts`).

    Not in a library with AMX kernels: built by gcc, they crash on quantised weights (llama.cpp PR 26954).
    """
    return b"AMX_INT8 = 1" not in llama()[0].llama_print_system_info()
