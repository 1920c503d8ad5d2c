"""What llama.cpp's arithmetic does to the activations of a product, by the type of its matrix.

On the CPU, both sides of a dot product have matching types (`vec_dot_type` in ggml-cpu.c): F16 for F16, BF16 for BF16,
blocks of 8 bits for quantised types. CUDA and Metal round no more than that.
"""

from __future__ import annotations

from typing import Any

import torch

_Q8_BLOCK, _K_BLOCK, _Q8_STEPS = 32, 256, 127
_SMALL_BLOCKS = frozenset({"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4", "NVFP4"})


def rounded(x: Any, type_name: str) -> Any:
    """`x` [..., n] float64, rounded as the activations of a product with a matrix of this type."""
    if type_name == "F32":
        return x.to(torch.float32).double()
    if type_name == "F16":
        return x.to(torch.float16).double()
    if type_name == "BF16":
        return x.to(torch.bfloat16).double()
    block = _Q8_BLOCK if type_name in _SMALL_BLOCKS else _K_BLOCK
    if x.shape[-1] % block:
        block = x.shape[-1]
    blocks = x.reshape(*x.shape[:-1], -1, block)
    step = blocks.abs().amax(-1, keepdim=True) / _Q8_STEPS
    step = step.clamp_min(torch.finfo(torch.float32).tiny)
    return ((blocks / step).round() * step).reshape(x.shape)
