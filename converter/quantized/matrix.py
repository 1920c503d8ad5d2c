"""A quantised matrix as a source of F32 rows: (code - zero point) * scale, a few rows at a time.

Scales and zero points are grids: one number serves a tile of [rows, columns] weights. Per tensor, per channel,
per group and per block are tiles of other sizes.

Products are F32, as the defining libraries give them in F32. compressed-tensors computes in the dtype of its scales
(NVFP4: in F32, then BF16): that is our product rounded once, since the few bits of a weight times a BF16 or F16 scale
fit F32 exactly. transformers computes FP8 in F32. modelopt computes NVFP4 in F32; its FP8 rounds the scale to the
dtype it is asked for, which F32 leaves alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from dflash2.converter.quantized.codes import SCALES, Code
from dflash2.converter.safetensors_file import StoredTensor
from dflash2.converter.sources import Bytes, Floats, Source
from dflash2.errors import CheckpointError


class Grid(Protocol):
    """Numbers of which each serves `width` neighbouring columns."""

    @property
    def width(self) -> int:
        """Columns of a tile."""

    def rows(self, start: int, count: int) -> Floats:
        """[count, tiles across]: the numbers for those rows of the matrix."""


@dataclass(frozen=True)
class Scales:
    """A grid of scales; `tensor` is [tiles down, tiles across].

    `per_tensor` is a second scale of the whole matrix: multiplied (modelopt) or, if `inverse`, divided by
    (compressed-tensors).
    """

    tensor: StoredTensor
    tile: tuple[int, int]
    per_tensor: np.float32 | None = None
    inverse: bool = False

    @property
    def width(self) -> int:
        """Columns of a tile."""
        return self.tile[1]

    def rows(self, start: int, count: int) -> Floats:
        """[count, tiles across]; raises CheckpointError for a scale that is not finite."""
        found, picked = _tile_rows(self.tensor, self.tile[0], start, count)
        scales = SCALES[self.tensor.dtype](found).reshape(len(picked.tiles), -1)
        with np.errstate(over="ignore", invalid="ignore"):
            if self.per_tensor is not None:
                scales = scales / self.per_tensor if self.inverse else scales * self.per_tensor
        if not np.isfinite(scales).all():
            raise CheckpointError(
                f"{self.tensor.path}: tensor {self.tensor.name!r} has a scale that is not finite; the checkpoint is"
                " damaged, download it again."
            )
        return scales[picked.rows]


@dataclass(frozen=True)
class ZeroPoints:
    """A grid of zero points, a byte each."""

    tensor: StoredTensor
    tile: tuple[int, int]
    code: Code

    @property
    def width(self) -> int:
        """Columns of a tile."""
        return self.tile[1]

    def rows(self, start: int, count: int) -> Floats:
        """[count, tiles across]."""
        found, picked = _tile_rows(self.tensor, self.tile[0], start, count)
        return self.code.read(found).reshape(len(picked.tiles), -1)[picked.rows]


@dataclass(frozen=True)
class PackedZeroPoints:
    """Zero points of tiles one row high, packed down the rows into 32-bit words: `tensor` is [words, tiles across]."""

    tensor: StoredTensor
    width: int
    code: Code

    def rows(self, start: int, count: int) -> Floats:
        """[count, tiles across]."""
        per_word = 4 * self.code.per_byte
        found, picked = _tile_rows(self.tensor, per_word, start, count)
        across = self.tensor.shape[1]
        # [words, across, byte] in the file; a row of the matrix is one place in every word.
        words = np.ascontiguousarray(found.reshape(-1, across, 4).swapaxes(1, 2))
        values = self.code.read(words.reshape(-1)).reshape(-1, 4, across, self.code.per_byte).swapaxes(2, 3)
        first = start - picked.tiles.start * per_word
        return values.reshape(-1, across)[first : first + count]


@dataclass(frozen=True)
class _Picked:
    """`tiles`: rows of the grid that were read; `rows`: for each row of the matrix, which of them."""

    tiles: range
    rows: npt.NDArray[np.int64]


def _tile_rows(tensor: StoredTensor, height: int, start: int, count: int) -> tuple[Bytes, _Picked]:
    first, last = start // height, (start + count - 1) // height
    row_bytes = tensor.n_bytes // tensor.shape[0] if tensor.shape else tensor.n_bytes
    tiles = range(first, last + 1)
    rows = np.arange(start, start + count) // height - first
    return tensor.read(first * row_bytes, len(tiles) * row_bytes), _Picked(tiles, rows)


@dataclass(frozen=True)
class QuantizedMatrix(Source):
    """Source of a matrix [rows, columns] stored as codes.

    `groups`, if given, names the scale of each column (activation order); otherwise neighbouring columns share one.
    """

    size: tuple[int, int]
    tensor: StoredTensor
    code: Code
    scales: Scales
    zero_points: Grid | None = None
    groups: npt.NDArray[np.int64] | None = None

    @property
    @override
    def shape(self) -> tuple[int, ...]:
        return self.size

    @property
    @override
    def label(self) -> str:
        return f"{self.tensor.path}: tensor {self.tensor.name!r}"

    @override
    def rows(self, start: int, count: int) -> Floats:
        row_bytes = self.tensor.n_bytes // self.size[0]
        data = self.tensor.read(start * row_bytes, count * row_bytes)
        # Packing to whole words can leave values past the last column.
        values = np.ascontiguousarray(self.code.read(data).reshape(count, -1)[:, : self.size[1]])
        if self.zero_points is not None:
            self._apply(np.subtract, values, self.zero_points, start)
        self._apply(np.multiply, values, self.scales, start)
        return values

    def _apply(self, operation: np.ufunc, values: Floats, grid: Grid, start: int) -> None:
        """`values` = `operation`(values, the grid's number for each), in place."""
        numbers = grid.rows(start, len(values))
        # A product beyond F32 is infinite, which the encoder refuses for every source.
        with np.errstate(over="ignore"):
            self._apply_numbers(operation, values, numbers, grid.width)

    def _apply_numbers(self, operation: np.ufunc, values: Floats, numbers: Floats, width: int) -> None:
        count, columns = values.shape
        if self.groups is not None:
            operation(values, numbers[:, self.groups], out=values)
        elif columns % width == 0:
            tiles = values.reshape(count, -1, width)
            operation(tiles, numbers[:, :, None], out=tiles)
        else:
            operation(values, np.repeat(numbers, width, axis=1)[:, :columns], out=values)


def tiles_of(shape: tuple[int, int], tile: tuple[int, int]) -> tuple[int, int]:
    """How many tiles [down, across] cover a matrix; those at the edges may be cut."""
    return math.ceil(shape[0] / tile[0]), math.ceil(shape[1] / tile[1])
