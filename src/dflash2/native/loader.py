"""Finds the llama.cpp library, and declares the symbols that llama_cpp does not.

Signatures: `include/llama.h` and `src/llama-ext.h` of the pinned llama.cpp.
"""

from __future__ import annotations

import ctypes
import os
import sys
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from dflash2.constants import LLAMA_CPP_PYTHON_VERSION
from dflash2.errors import NativeError

# A folder with a patched libllama; llama_cpp reads its own variable once, when it is first imported.
LIBRARY_VARIABLE = "DFLASH2_LIBRARY_PATH"
_LLAMA_CPP_VARIABLE = "LLAMA_CPP_LIB_PATH"


class Symbol(NamedTuple):
    """One function of `llama-ext.h`: C++ linkage, so its name depends on the compiler."""

    itanium: str
    msvc: str
    result: Any
    arguments: tuple[Any, ...]


_POINTER = ctypes.c_void_p
SYMBOLS = {
    "llama_set_embeddings_layer_inp": Symbol(
        "_Z30llama_set_embeddings_layer_inpP13llama_contextjb",
        "?llama_set_embeddings_layer_inp@@YAXPEAUllama_context@@I_N@Z",
        None,
        (_POINTER, ctypes.c_uint32, ctypes.c_bool),
    ),
    "llama_get_embeddings_layer_inp": Symbol(
        "_Z30llama_get_embeddings_layer_inpP13llama_contextj",
        "?llama_get_embeddings_layer_inp@@YAPEAMPEAUllama_context@@I@Z",
        _POINTER,
        (_POINTER, ctypes.c_uint32),
    ),
    "llama_set_embeddings_nextn": Symbol(
        "_Z26llama_set_embeddings_nextnP13llama_contextbb",
        "?llama_set_embeddings_nextn@@YAXPEAUllama_context@@_N1@Z",
        None,
        (_POINTER, ctypes.c_bool, ctypes.c_bool),
    ),
    "llama_get_embeddings_nextn": Symbol(
        "_Z26llama_get_embeddings_nextnP13llama_context",
        "?llama_get_embeddings_nextn@@YAPEAMPEAUllama_context@@@Z",
        _POINTER,
        (_POINTER,),
    ),
}


@dataclass(frozen=True)
class Library:
    """The llama.cpp library in use: `path` of the file, and whether it was chosen by us (`patched`)."""

    path: Path
    patched: bool


def _prefer_patched_library() -> bool:
    """Point llama_cpp at a patched library before its first import; False if there is none, or it is too late."""
    folder = os.environ.get(LIBRARY_VARIABLE)
    if not folder or "llama_cpp" in sys.modules or _LLAMA_CPP_VARIABLE in os.environ:
        return False
    os.environ[_LLAMA_CPP_VARIABLE] = folder
    return True


@cache
def llama() -> tuple[Any, Library]:
    """The module `llama_cpp.llama_cpp` with its library loaded."""
    patched = _prefer_patched_library()
    try:
        module = import_module("llama_cpp.llama_cpp")
    except (ImportError, RuntimeError, OSError) as error:
        raise NativeError(
            f"llama-cpp-python cannot be loaded ({error}); install llama-cpp-python {LLAMA_CPP_PYTHON_VERSION}."
        ) from error
    return module, Library(Path(module._lib._name), patched)


def library() -> Library:
    """Load llama.cpp if need be and say which library is in use; raises NativeError if there is none."""
    return llama()[1]


@cache
def function(name: str) -> Any:
    """A function of `llama-ext.h` under its plain, Itanium or MSVC name."""
    module, loaded = llama()
    symbol = SYMBOLS[name]
    for exported in (name, symbol.itanium, symbol.msvc):
        found = getattr(module._lib, exported, None)
        if found is not None:
            found.restype, found.argtypes = symbol.result, list(symbol.arguments)
            return found
    raise NativeError(
        f"{loaded.path} (llama-cpp-python {version('llama-cpp-python')}) does not export {name}, which DFlash needs; "
        f"install llama-cpp-python {LLAMA_CPP_PYTHON_VERSION}."
    )


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
