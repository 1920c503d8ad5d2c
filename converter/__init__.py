"""Hugging Face drafter checkpoint to GGUF, and what a GGUF file says about itself."""

from dflash2.converter.config import Attention, Convolution, DrafterConfig, Rope, RopeScaling, Selector
from dflash2.converter.conversion import Conversion, convert
from dflash2.converter.inspection import DrafterFacts, Inspection, RopeFacts, TypeUse, inspect
from dflash2.converter.outtypes import DIRECT_TYPES, OUT_TYPES, TENSOR_TYPES
from dflash2.converter.overrides import Overrides

__all__ = [
    "DIRECT_TYPES",
    "OUT_TYPES",
    "TENSOR_TYPES",
    "Attention",
    "Conversion",
    "Convolution",
    "DrafterConfig",
    "DrafterFacts",
    "Inspection",
    "Overrides",
    "Rope",
    "RopeFacts",
    "RopeScaling",
    "Selector",
    "TypeUse",
    "convert",
    "inspect",
]
