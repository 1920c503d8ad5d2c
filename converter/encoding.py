"""Values of one tensor as GGUF bytes, a few megabytes at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType
from gguf.quants import quantize

from dflash2.converter.plan import PlannedTensor
from dflash2.converter.safetensors_file import StoredTensor
from dflash2.errors import CheckpointError

OutType = Literal["f32", "f16", "bf16", "q8_0"]
OUT_TYPES: tuple[OutType, ...] = get_args(OutType)

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

_Type = GGMLQuantizationType
_STORAGE = {"f32": _Type.F32, "f16": _Type.F16, "bf16": _Type.BF16, "q8_0": _Type.Q8_0}
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
_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True)
class EncodedTensor:
    """A planned tensor with the type it is stored as."""

    planned: PlannedTensor
    type: GGMLQuantizationType

    @property
    def n_bytes(self) -> int:
        """Size in the GGUF file, without padding."""
        return n_bytes(self.planned.n_elements, self.type)


def n_bytes(n_elements: int, ggml_type: GGMLQuantizationType) -> int:
    """Bytes of `n_elements` values stored as `ggml_type`."""
    block, block_bytes = GGML_QUANT_SIZES[ggml_type]
    return n_elements // block * block_bytes


def choose_type(planned: PlannedTensor, outtype: OutType) -> EncodedTensor:
    """Norms, vectors and tensors without `.weight` stay F32 (as upstream); others get the wanted type."""
    wanted = _STORAGE[outtype]
    name = planned.name
    if len(planned.shape) == 1 or name.endswith("_norm.weight") or not name.endswith(".weight"):
        wanted = _Type.F32
    elif planned.shape[-1] % GGML_QUANT_SIZES[wanted][0]:
        wanted = _FALLBACK
    return EncodedTensor(planned, wanted)


def encode(tensor: EncodedTensor) -> Iterator[Bytes]:
    """The tensor's GGUF bytes in order; raises CheckpointError if a value does not fit the type."""
    planned = tensor.planned
    if planned.stored is None:
        yield np.array(planned.values, np.float32).view(np.uint8)
        return
    if planned.stored.dtype == tensor.type.name and not planned.interleaved_heads:
        yield from _raw_chunks(planned.stored, _CHUNK_BYTES)
        return
    for rows in _float_rows(planned):
        limit = _LIMITS.get(tensor.type)
        if limit is not None and not _within(rows, limit):
            raise CheckpointError(
                f"{planned.stored.path}: tensor {planned.stored.name!r} has values that {tensor.type.name} cannot hold"
                f" (beyond +-{limit:.0f}); convert with outtype bf16 or f32."
            )
        yield quantize(rows, tensor.type).reshape(-1).view(np.uint8)


def _within(rows: Floats, limit: float) -> bool:
    """NaN passes (it stays NaN), infinities do not."""
    return not bool((np.abs(rows) > limit).any())


def _raw_chunks(stored: StoredTensor, chunk_bytes: int) -> Iterator[Bytes]:
    for start in range(0, stored.n_bytes, chunk_bytes):
        yield stored.read(start, min(chunk_bytes, stored.n_bytes - start))


def _float_rows(planned: PlannedTensor) -> Iterator[Floats]:
    """Whole rows as F32, [rows, row length]; one chunk if rows must be reordered."""
    assert planned.stored is not None
    stored, width = planned.stored, planned.shape[-1]
    n_rows = planned.n_elements // width
    row_bytes = stored.n_bytes // n_rows
    per_chunk = n_rows if planned.interleaved_heads else max(1, _CHUNK_BYTES // row_bytes)
    for chunk in _raw_chunks(stored, per_chunk * row_bytes):
        rows = _WIDEN[stored.dtype](chunk).reshape(-1, width)
        yield _split_halves(rows, planned) if planned.interleaved_heads else rows


def _split_halves(rows: Floats, planned: PlannedTensor) -> Floats:
    """Per head: even dimensions first, then odd ones (rotary pairs (i, i+1) become (i, i + half))."""
    half = planned.interleaved_heads // 2
    inner = math.prod(planned.shape[1:])
    heads = rows.reshape(-1, half, 2, inner).swapaxes(1, 2)
    return np.ascontiguousarray(heads).reshape(rows.shape)


def _widen_bf16(data: Bytes) -> Floats:
    return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _widen_f16(data: Bytes) -> Floats:
    return data.view(np.float16).astype(np.float32)


def _keep_f32(data: Bytes) -> Floats:
    return data.view(np.float32)


_WIDEN = {"BF16": _widen_bf16, "F16": _widen_f16, "F32": _keep_f32}
