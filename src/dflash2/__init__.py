"""DFlash 2 block-diffusion speculative decoding for llama.cpp, llama-cpp-python and Ollama.

Importing this package imports nothing native: `DFlashLlama` and `DraftStats` load on first use.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING

from dflash2.errors import Dflash2Error

if TYPE_CHECKING:
    from dflash2.runtime import DFlashLlama, DraftStats

__version__ = version("llama-dflash2")
__all__ = ["DFlashLlama", "Dflash2Error", "DraftStats", "__version__"]

_RUNTIME_NAMES = ("DFlashLlama", "DraftStats")


def __getattr__(name: str) -> object:
    if name in _RUNTIME_NAMES:
        return getattr(import_module("dflash2.runtime"), name)
    raise AttributeError(f"module 'dflash2' has no attribute {name!r}")
