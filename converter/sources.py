"""Where the values of a planned tensor come from, read a few rows at a time."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from typing_extensions import override

from dflash2.converter.safetensors_file import StoredTensor

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

_Type = GGMLQuantizationType


class Source(ABC):
    """Values of one tensor. Rows are the flattened leading dimensions; a vector is one row."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Outermost first."""

    @property
    @abstractmethod
    def label(self) -> str:
        """What it is, for errors: `PATH: tensor 'NAME'`."""

    @property
    def raw_type(self) -> GGMLQuantizationType | None:
        """The type whose bytes `raw` gives; None if the values must be computed."""
        return None

    @property
    def fixed_type(self) -> bool:
        """Whether the tensor must be stored as `raw_type`, whatever type of output is asked for."""
        return False

    def raw(self, start: int, count: int) -> Bytes:
        """Bytes of rows `start` to `start + count` in `raw_type`; those of F32 if they are computed."""
        return self.rows(start, count).reshape(-1).view(np.uint8)

    @abstractmethod
    def rows(self, start: int, count: int) -> Floats:
        """The same rows as F32, [count, row length]."""


def row_length(source: Source) -> int:
    """Values per row."""
    return source.shape[-1]


def row_count(source: Source) -> int:
    """Rows in all."""
    return math.prod(source.shape[:-1])


def n_bytes(n_elements: int, ggml_type: GGMLQuantizationType) -> int:
    """Bytes of `n_elements` values stored as `ggml_type`."""
    block, block_bytes = GGML_QUANT_SIZES[ggml_type]
    return n_elements // block * block_bytes


@dataclass(frozen=True)
class Stored(Source):
    """A BF16, F16 or F32 tensor of a safetensors file."""

    tensor: StoredTensor

    @property
    @override
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    @property
    @override
    def label(self) -> str:
        return f"{self.tensor.path}: tensor {self.tensor.name!r}"

    @property
    @override
    def raw_type(self) -> GGMLQuantizationType | None:
        return GGMLQuantizationType[self.tensor.dtype]

    @override
    def raw(self, start: int, count: int) -> Bytes:
        row_bytes = n_bytes(row_length(self), GGMLQuantizationType[self.tensor.dtype])
        return self.tensor.read(start * row_bytes, count * row_bytes)

    @override
    def rows(self, start: int, count: int) -> Floats:
        return WIDEN[self.tensor.dtype](self.raw(start, count)).reshape(count, row_length(self))


@dataclass(frozen=True)
class Computed(Source):
    """Values that follow from the config: an F32 array, or I64 for token ids."""

    values: npt.NDArray[np.float32] | npt.NDArray[np.int64]
    origin: str

    @property
    @override
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    @override
    def label(self) -> str:
        return self.origin

    @property
    @override
    def raw_type(self) -> GGMLQuantizationType | None:
        return _Type.I64 if self.values.dtype == np.int64 else _Type.F32

    @property
    @override
    def fixed_type(self) -> bool:
        return self.raw_type is _Type.I64

    @override
    def raw(self, start: int, count: int) -> Bytes:
        rows = self.values.reshape(row_count(self), row_length(self))[start : start + count]
        return np.ascontiguousarray(rows).reshape(-1).view(np.uint8)

    @override
    def rows(self, start: int, count: int) -> Floats:
        return self.values.reshape(row_count(self), row_length(self))[start : start + count].astype(np.float32)


@dataclass(frozen=True)
class Derived(Source):
    """What another source becomes; its shape, name and type unless a subclass says otherwise."""

    source: Source

    @property
    @override
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    @property
    @override
    def label(self) -> str:
        return self.source.label

    @property
    @override
    def raw_type(self) -> GGMLQuantizationType | None:
        return self.source.raw_type

    @property
    @override
    def fixed_type(self) -> bool:
        return self.source.fixed_type


@dataclass(frozen=True)
class HalfSplit(Derived):
    """Per head of `head_dim` rows (or values of a vector): even ones first, then odd ones.

    Rotary pairs (i, i+1) of a checkpoint become llama.cpp's (i, i + half).
    """

    head_dim: int

    @property
    @override
    def raw_type(self) -> GGMLQuantizationType | None:
        return None

    @override
    def rows(self, start: int, count: int) -> Floats:
        if len(self.shape) == 1:
            return np.ascontiguousarray(self.source.rows(0, 1)[:, self._order(0, self.shape[0])])
        order = self._order(start, count)
        first = int(order.min())
        return np.ascontiguousarray(self.source.rows(first, int(order.max()) - first + 1)[order - first])

    def _order(self, start: int, count: int) -> npt.NDArray[np.int64]:
        """Where the values `start` to `start + count` of the output stand in the source."""
        place = np.arange(start, start + count)
        head, inside = np.divmod(place, self.head_dim)
        half = self.head_dim // 2
        return head * self.head_dim + np.where(inside < half, 2 * inside, 2 * (inside - half) + 1)


def _widen_bf16(data: Bytes) -> Floats:
    return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _widen_f16(data: Bytes) -> Floats:
    return data.view(np.float16).astype(np.float32)


def _keep_f32(data: Bytes) -> Floats:
    return data.view(np.float32)


WIDEN = {"BF16": _widen_bf16, "F16": _widen_f16, "F32": _keep_f32}
