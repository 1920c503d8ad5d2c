"""Values of a tensor as GGUF bytes, a few rows at a time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize

from dflash2.converter.plan import PlannedTensor
from dflash2.converter.sources import Bytes, Floats, n_bytes, row_count, row_length
from dflash2.errors import CheckpointError

_Type = GGMLQuantizationType
_F16_MAX = 65504.0
# Largest magnitude each type can hold; Q8_0 keeps an F16 scale of the largest value over 127.
_LIMITS = {_Type.F16: _F16_MAX, _Type.Q8_0: _F16_MAX * 127}
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
    """A planned tensor with the type it is stored as; `limit` is the largest magnitude allowed, None the type's own."""

    planned: PlannedTensor
    type: GGMLQuantizationType
    limit: float | None = None

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
        if chunk.tensor.limit is not None:
            _check_range(chunk, source.rows(chunk.start, chunk.count), chunk.tensor.limit)
        return data
    rows = source.rows(chunk.start, chunk.count)
    if not _finite(rows, _Type.F32):
        raise _not_finite(chunk)
    limit = chunk.tensor.limit or _LIMITS.get(wanted)
    if limit is not None:
        _check_range(chunk, rows, limit)
    return quantize(rows, wanted).reshape(-1).view(np.uint8)


def _check_range(chunk: Chunk, rows: Floats, limit: float) -> None:
    if not -limit <= float(rows.min()) <= float(rows.max()) <= limit:
        what = "a quantised type" if chunk.tensor.limit else chunk.tensor.type.name
        raise CheckpointError(
            f"{chunk.tensor.planned.source.label} has values that {what} cannot hold (beyond +-{limit:.0f}); convert"
            " with outtype bf16 or f32."
        )


def _finite(values: Bytes | Floats, stored_as: GGMLQuantizationType) -> bool:
    word, exponent = _EXPONENTS[stored_as]
    return bool((values.view(word) & word(exponent)).max() != exponent)


def _not_finite(chunk: Chunk) -> CheckpointError:
    return CheckpointError(
        f"{chunk.tensor.planned.source.label} has values that are infinite or not a number; download it again."
    )
