"""Which targets publish their layers' inputs in the library at hand."""

from __future__ import annotations

import ctypes
from functools import cache

from dflash2.constants import FINAL_TAP_ARCHITECTURES, TAPPABLE_ARCHITECTURES
from dflash2.errors import NativeError
from dflash2.native.loader import llama

# Exported by a patched library alone (patches/src/include/dflash2-taps.h).
_ADDED = "dflash2_tapped_architectures"


def tappable_architectures() -> frozenset[str]:
    """GGUF names of the targets that can be tapped: stock llama.cpp's, and what a patched library says it adds.

    Without a library, stock's.
    """
    return TAPPABLE_ARCHITECTURES | _added(output=False)


def final_tap_architectures() -> frozenset[str]:
    """Those of them that also publish the output of their last layer."""
    return FINAL_TAP_ARCHITECTURES | _added(output=True)


@cache
def _added(*, output: bool) -> frozenset[str]:
    try:
        function = getattr(llama()[0]._lib, _ADDED, None)
    except NativeError:
        return frozenset()
    if function is None:
        return frozenset()
    function.restype, function.argtypes = ctypes.c_char_p, [ctypes.c_bool]
    return frozenset(function(output).decode().split(","))
