"""Checkpoints with `quant_method: fp8`: E4M3 weights with a scale per block (as DeepSeek publishes them) or per tensor.

A block at the edge is cut, not stretched: its scale serves what is left of it.
"""

from __future__ import annotations

from dflash2.converter.dialects.fields import Fields
from dflash2.converter.quantized import codes
from dflash2.converter.quantized.matrix import QuantizedMatrix
from dflash2.converter.quantized.module import Module, ModuleReader, Shape, matrix_shape, read_scales
from dflash2.converter.sources import Source

PARTS = ("weight_scale_inv", "weight_scale")
_BLOCK_KEY = "weight_block_size"
# Where the key is absent, one library takes this and another one scale per tensor; the shape of the scale tells.
_BLOCK = (128, 128)
_SINGLE = ((), (1,))
_SCALE_DTYPES = (*codes.SCALE_FLOATS, *codes.SCALE_EXPONENTS)


def read_fp8(fields: Fields) -> ModuleReader:
    """A reader of the modules of a checkpoint with this quantization_config."""
    block = _read_block(fields)

    def read(module: Module) -> Source:
        tensor = module.part("weight", (codes.E4M3.dtype,))
        shape = matrix_shape(tensor, codes.E4M3)
        # Both names mean the same factor.
        part = "weight_scale" if "weight_scale" in module.parts else "weight_scale_inv"
        single = block is None and module.part(part, _SCALE_DTYPES).shape in _SINGLE
        scales = read_scales(module, part, shape, shape if single else block or _BLOCK, _SCALE_DTYPES)
        return QuantizedMatrix(shape, tensor, codes.E4M3, scales)

    return read


def _read_block(fields: Fields) -> Shape | None:
    if fields.get(_BLOCK_KEY) is None:
        return None
    sizes = fields.integers(_BLOCK_KEY)
    if len(sizes) != 2 or not all(sizes):
        raise fields.wrong(_BLOCK_KEY, f"is {list(sizes)}, not two positive sizes")
    return sizes[0], sizes[1]
