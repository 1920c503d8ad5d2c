"""Values of a tensor as GGUF bytes, a few rows at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType
from gguf.quants import quantize

from dflash2.converter.plan import PlannedTensor
from dflash2.converter.sources import Bytes, Floats, n_bytes, row_count, row_length
from dflash2.errors import CheckpointError

OutType = Literal["f32", "f16", "bf16", "q8_0"]
OUT_TYPES: tuple[OutType, ...] = get_args(OutType)

_Type = GGMLQuantizationType
STORAGE = {"f32": _Type.F32, "f16": _Type.F16, "bf16": _Type.BF16, "q8_0": _Type.Q8_0}
FILE_TYPES = {
    "f32": LlamaFileType.ALL_F32,
    "f16": LlamaFileType.MOSTLY_F16,
    "bf16": LlamaFileType.MOSTLY_BF16,
    "q8_0": LlamaFileType.MOSTLY_Q8_0,
}
_F16_MAX = 65504.0
# Largest magnitude each type can hold; Q8_0 keeps an F16 scale of the largest value over 127.
_LIMITS = {_Type.F16: _F16_MAX, _Type.Q8_0: _F16_MAX * 127}
# As upstream: rows that are no multiple of the block size.
_FALLBACK = _Type.F16
# Exponent bits: all of them set means infinity or NaN.
_EXPONENTS = {
    _Type.BF16: (np.uint16, 0x7F80),
    _Type.F16: (np.uint16, 0x7C00),
    _Type.F32: (np.uint32, 0x7F800000),
}
# Small enough for a core's cache, large enough for a disk.
_CHUNK_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class EncodedTensor:
    """A planned tensor with the type it is stored as."""

    planned: PlannedTensor
    type: GGMLQuantizationType

    @property
    def n_bytes(self) -> int:
        """Size in the GGUF file, without padding."""
        return n_bytes(self.planned.n_elements, self.type)


@dataclass(frozen=True)
class Chunk:
    """Rows `start` to `start + count` of a tensor; `offset` in bytes from the tensor's begin in the GGUF file."""

    tensor: EncodedTensor
    start: int
    count: int

    @property
    def offset(self) -> int:
        """Where the chunk's bytes go, from the begin of the tensor."""
        return n_bytes(self.start * row_length(self.tensor.planned.source), self.tensor.type)


def choose_type(planned: PlannedTensor, outtype: OutType) -> EncodedTensor:
    """A fixed type stays; norms, vectors and tensors without `.weight` become F32 (as upstream), others `outtype`."""
    wanted = STORAGE[outtype]
    name, source = planned.name, planned.source
    if source.fixed_type:
        assert source.raw_type is not None
        wanted = source.raw_type
    elif len(planned.shape) == 1 or name.endswith("_norm.weight") or not name.endswith(".weight"):
        wanted = _Type.F32
    elif planned.shape[-1] % GGML_QUANT_SIZES[wanted][0]:
        wanted = _FALLBACK
    return EncodedTensor(planned, wanted)


def chunks(tensor: EncodedTensor) -> tuple[Chunk, ...]:
    """The tensor in pieces of about a million values."""
    source = tensor.planned.source
    n_rows, step = row_count(source), max(1, _CHUNK_ELEMENTS // row_length(source))
    return tuple(Chunk(tensor, start, min(step, n_rows - start)) for start in range(0, n_rows, step))


def encode(chunk: Chunk) -> Bytes:
    """The chunk's GGUF bytes; raises CheckpointError if a value is not finite or does not fit the type."""
    source, wanted = chunk.tensor.planned.source, chunk.tensor.type
    if source.raw_type == wanted:
        data = source.raw(chunk.start, chunk.count)
        if wanted in _EXPONENTS and not _finite(data, wanted):
            raise _not_finite(chunk)
        return data
    rows = source.rows(chunk.start, chunk.count)
    if not _finite(rows, _Type.F32):
        raise _not_finite(chunk)
    limit = _LIMITS.get(wanted)
    if limit is not None and not -limit <= float(rows.min()) <= float(rows.max()) <= limit:
        raise CheckpointError(
            f"{source.label} has values that {wanted.name} cannot hold (beyond +-{limit:.0f}); convert with outtype"
            " bf16 or f32."
        )
    return quantize(rows, wanted).reshape(-1).view(np.uint8)


def _finite(values: Bytes | Floats, stored_as: GGMLQuantizationType) -> bool:
    word, exponent = _EXPONENTS[stored_as]
    return bool((values.view(word) & word(exponent)).max() != exponent)


def _not_finite(chunk: Chunk) -> CheckpointError:
    return CheckpointError(
        f"{chunk.tensor.planned.source.label} has values that are infinite or not a number; download it again."
    )
