"""Quantised checkpoints as F32 values: the formats whose libraries define them exactly; others refused by name."""

from dflash2.converter.quantized.opening import open_quantized

__all__ = ["open_quantized"]
