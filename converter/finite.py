"""Whether stored values are finite, by looking at exponents and block scales instead of computing every value."""

from __future__ import annotations

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from dflash2.converter.sources import Bytes, Floats

_Type = GGMLQuantizationType

# Exponent bits: all of them set means infinity or NaN.
_EXPONENTS = {
    _Type.BF16: (np.uint16, 0x7F80),
    _Type.F16: (np.uint16, 0x7C00),
    _Type.F32: (np.uint32, 0x7F800000),
}
# Where in a block its F16 scales (and minima) stand, in bytes: with those finite every value is (ggml-common.h).
_SCALES: dict[GGMLQuantizationType, tuple[int, ...]] = {
    **dict.fromkeys((_Type.Q4_0, _Type.Q5_0, _Type.Q8_0, _Type.IQ4_NL, _Type.IQ4_XS), (0,)),
    **dict.fromkeys((_Type.IQ1_S, _Type.IQ2_XXS, _Type.IQ2_XS, _Type.IQ2_S, _Type.IQ3_XXS, _Type.IQ3_S), (0,)),
    **dict.fromkeys((_Type.Q4_1, _Type.Q5_1, _Type.Q4_K, _Type.Q5_K), (0, 2)),
    _Type.Q2_K: (80, 82),
    _Type.Q3_K: (108,),
    _Type.Q6_K: (208,),
    _Type.TQ1_0: (52,),
    _Type.TQ2_0: (64,),
}


def all_finite(values: Bytes | Floats, stored_as: GGMLQuantizationType) -> bool:
    """Whether no value is infinite or NaN; `values` are whole blocks. True for types that nothing here can read."""
    if stored_as in _EXPONENTS:
        word, exponent = _EXPONENTS[stored_as]
        return bool((values.view(word) & word(exponent)).max() != exponent)
    if stored_as in _SCALES:
        blocks = values.view(np.uint8).reshape(-1, GGML_QUANT_SIZES[stored_as][1])
        scales = (np.ascontiguousarray(blocks[:, at : at + 2]) for at in _SCALES[stored_as])
        return all(all_finite(scale, _Type.F16) for scale in scales)
    try:
        with np.errstate(all="ignore"):
            return bool(np.isfinite(dequantize(values.view(np.uint8), stored_as)).all())
    except NotImplementedError:
        return True
