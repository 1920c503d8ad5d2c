"""Functions of llama.cpp that llama_cpp does not declare, under every name a library may export them by.

They have C++ linkage in the stock library, so the name depends on the compiler: Itanium (Linux, macOS, MinGW) or MSVC
(Windows). A patched library also exports them under plain names, those of `patches/src/include/dflash2.h`.
Signatures: `src/llama-ext.h` of the pinned llama.cpp.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple


class Symbol(NamedTuple):
    """One function: its names, and what ctypes must know of it."""

    c: str
    itanium: str
    msvc: str
    result: Any
    arguments: tuple[Any, ...]

    @property
    def names(self) -> tuple[str, str, str]:
        """Every name it may be exported by, the plain one first."""
        return self.c, self.itanium, self.msvc


_POINTER = ctypes.c_void_p
SYMBOLS = {
    "llama_set_embeddings_layer_inp": Symbol(
        "dflash2_set_embeddings_layer_inp",
        "_Z30llama_set_embeddings_layer_inpP13llama_contextjb",
        "?llama_set_embeddings_layer_inp@@YAXPEAUllama_context@@I_N@Z",
        None,
        (_POINTER, ctypes.c_uint32, ctypes.c_bool),
    ),
    "llama_get_embeddings_layer_inp": Symbol(
        "dflash2_get_embeddings_layer_inp",
        "_Z30llama_get_embeddings_layer_inpP13llama_contextj",
        "?llama_get_embeddings_layer_inp@@YAPEAMPEAUllama_context@@I@Z",
        _POINTER,
        (_POINTER, ctypes.c_uint32),
    ),
    "llama_set_embeddings_nextn": Symbol(
        "dflash2_set_embeddings_nextn",
        "_Z26llama_set_embeddings_nextnP13llama_contextbb",
        "?llama_set_embeddings_nextn@@YAXPEAUllama_context@@_N1@Z",
        None,
        (_POINTER, ctypes.c_bool, ctypes.c_bool),
    ),
    "llama_get_embeddings_nextn": Symbol(
        "dflash2_get_embeddings_nextn",
        "_Z26llama_get_embeddings_nextnP13llama_context",
        "?llama_get_embeddings_nextn@@YAPEAMPEAUllama_context@@@Z",
        _POINTER,
        (_POINTER,),
    ),
}
# Came with DFlash 2, so that a library without it loads DFlash drafters of the first version alone.
SELECTOR_TOP_K = Symbol(
    "dflash2_model_selector_top_k",
    "_Z33llama_model_dflash_selector_top_kPK11llama_model",
    "?llama_model_dflash_selector_top_k@@YAHPEBUllama_model@@@Z",
    ctypes.c_int32,
    (_POINTER,),
)
# What patched code counts, one a kernel: how often it ran in this process. Each gives a uint64.
COUNTERS = (
    "ggml_cpu_dflash2_conv_count",
    "ggml_cpu_dflash2_top_k_count",
    "ggml_cuda_dflash2_conv_count",
    "ggml_cuda_dflash2_selector_count",
    "ggml_cuda_dflash2_top_k_count",
    "ggml_metal_dflash2_conv_count",
    "ggml_metal_dflash2_top_k_count",
)
