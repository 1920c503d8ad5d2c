"""The only ctypes: finds the llama.cpp library, declares the symbols llama_cpp does not, and checks before calling.

A failed GGML_ASSERT kills the interpreter, so every wrapper here checks what llama.cpp would assert and raises
NativeError instead.
"""

from dflash2.native.batch import Bytes, FloatArray, IntArray
from dflash2.native.choice import LIBRARY_VARIABLE
from dflash2.native.context import Context
from dflash2.native.devices import Device, device_bytes_in_use, device_names, devices, gpu_names
from dflash2.native.loader import (
    Library,
    lattice_layout,
    library,
    repacking_is_safe,
    require_symbols,
    silence,
)
from dflash2.native.model import Model
from dflash2.native.observe import Observer, Operation
from dflash2.native.options import AttentionOptions, ContextOptions, Outputs, Placement
from dflash2.native.parent_death import dies_with_parent
from dflash2.native.probe import Support, counters, knows_architecture, support
from dflash2.native.quantize import quantize_gguf
from dflash2.native.rpc import add_rpc_server, check_distinct, check_rpc_server
from dflash2.native.sampler import CUSTOM, Candidates, SamplerChain, TokenArray, top_candidates
from dflash2.native.taps import final_tap_architectures, tappable_architectures
from dflash2.native.tokenizer import Tokenizer

__all__ = [
    "CUSTOM",
    "LIBRARY_VARIABLE",
    "AttentionOptions",
    "Bytes",
    "Candidates",
    "Context",
    "ContextOptions",
    "Device",
    "FloatArray",
    "IntArray",
    "Library",
    "Model",
    "Observer",
    "Operation",
    "Outputs",
    "Placement",
    "SamplerChain",
    "Support",
    "TokenArray",
    "Tokenizer",
    "add_rpc_server",
    "check_distinct",
    "check_rpc_server",
    "counters",
    "device_bytes_in_use",
    "device_names",
    "devices",
    "dies_with_parent",
    "final_tap_architectures",
    "gpu_names",
    "knows_architecture",
    "lattice_layout",
    "library",
    "quantize_gguf",
    "repacking_is_safe",
    "require_symbols",
    "silence",
    "support",
    "tappable_architectures",
    "top_candidates",
]
