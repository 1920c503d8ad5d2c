"""Hugging Face drafter checkpoint to GGUF, and what a GGUF file says about itself."""

from dflash2.converter.config import DrafterConfig
from dflash2.converter.conversion import Conversion, convert
from dflash2.converter.encoding import OUT_TYPES, OutType

__all__ = ["OUT_TYPES", "Conversion", "DrafterConfig", "OutType", "convert"]
