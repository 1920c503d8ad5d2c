"""Tensors of a GGUF file as they stand in it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from typing_extensions import override

from dflash2.converter.sources import Bytes, Floats, Source, n_bytes, row_length
from dflash2.errors import GGUFError
from dflash2.gguf_info import TensorInfo
from dflash2.regular_file import open_file


@dataclass(frozen=True)
class GGUFRows(Source):
    """A tensor of a GGUF file; its bytes are copied, never encoded again."""

    path: Path
    tensor: TensorInfo

    @property
    @override
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape[::-1]

    @property
    @override
    def label(self) -> str:
        return f"{self.path}: tensor {self.tensor.name!r}"

    @property
    @override
    def raw_type(self) -> GGMLQuantizationType:
        return GGMLQuantizationType[self.tensor.type_name]

    @property
    @override
    def fixed_type(self) -> bool:
        return True

    @override
    def raw(self, start: int, count: int) -> Bytes:
        """Raises GGUFError if the file cannot be read."""
        row_bytes = n_bytes(row_length(self), self.raw_type)
        try:
            with open_file(self.path) as file:
                file.seek(self.tensor.offset + start * row_bytes)
                data = np.fromfile(file, np.uint8, count * row_bytes)
        except OSError as error:
            raise GGUFError(f"Cannot read {self.path}: {error.strerror or error}.") from error
        if data.size != count * row_bytes:
            raise GGUFError(f"{self.path} is truncated in tensor {self.tensor.name!r}; copy it again.")
        return data

    @override
    def rows(self, start: int, count: int) -> Floats:
        """Raises GGUFError if the file cannot be read, or for a type the gguf package cannot dequantise."""
        try:
            values = dequantize(self.raw(start, count).reshape(count, -1), self.raw_type)
        except NotImplementedError as error:
            raise GGUFError(
                f"{self.label} is {self.raw_type.name}, which the gguf package cannot dequantise; use a target of"
                " another type."
            ) from error
        return values.astype(np.float32, copy=False)
