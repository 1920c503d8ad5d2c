"""One safetensors file, read by its own header: exact bounds, any dtype (BF16 too), without torch.

Why not `safetensors.safe_open`: its numpy framework cannot give BF16 without another package, and it maps files,
so that a shard cut short under us would kill the process. The rules checked are those of its format description.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

import numpy as np
import numpy.typing as npt

from dflash2.converter.dialects.fields import unique_keys
from dflash2.errors import CheckpointError
from dflash2.regular_file import open_file

_LENGTH_BYTES = 8
_MAX_DIMENSIONS = 8  # no drafter has more than 3; the format names no limit
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
# Bytes per element; a dtype outside this table is refused by name.
_ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint: `shape` outermost first, `offset` of its bytes in the file."""

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def n_bytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]

    def read(self, start: int, n_bytes: int) -> npt.NDArray[np.uint8]:
        """Bytes `start` to `start + n_bytes` of the tensor; raises CheckpointError if they cannot be read."""
        try:
            with open_file(self.path) as file:
                file.seek(self.offset + start)
                data = np.fromfile(file, np.uint8, n_bytes)
        except OSError as error:
            raise CheckpointError(f"Cannot read {self.path}: {error.strerror or error}.") from error
        if data.size != n_bytes:
            raise CheckpointError(f"{self.path} is truncated in tensor {self.name!r}; download it again.")
        return data


def read_safetensors(path: Path) -> tuple[StoredTensor, ...]:
    """The tensors of one file; raises CheckpointError if it is truncated or not a safetensors file."""
    try:
        size = path.stat().st_size
        with open_file(path) as file:
            prefix = file.read(_LENGTH_BYTES)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == _LENGTH_BYTES else size
            if length > size - _LENGTH_BYTES:
                raise CheckpointError(
                    f"{path} is truncated or not a safetensors file: its header does not fit; download it again."
                )
            if length > _MAX_HEADER_BYTES:
                raise CheckpointError(f"{path} has a header of {length} bytes; the format allows {_MAX_HEADER_BYTES}.")
            header = file.read(length)
    except OSError as error:
        raise CheckpointError(f"Cannot read {path}: {error.strerror or error}.") from error
    tensors = _parse(path, header, data_start=_LENGTH_BYTES + length)
    _check_layout(path, tensors, data_start=_LENGTH_BYTES + length, size=size)
    return tensors


def _parse(path: Path, header: bytes, data_start: int) -> tuple[StoredTensor, ...]:
    try:
        entries = json.loads(header.decode("utf-8"), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a safetensors file: its header is not valid JSON ({error}).") from error
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path} is not a safetensors file: its header is not a JSON object.")
    return tuple(_entry(path, name, entry, data_start) for name, entry in entries.items() if name != "__metadata__")


def _entry(path: Path, name: str, entry: object, data_start: int) -> StoredTensor:
    if not isinstance(entry, dict):
        raise CheckpointError(f"{path}: the header entry of {name!r} is not a JSON object; download it again.")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        raise CheckpointError(f"{path}: tensor {name!r} has the unknown dtype {dtype!r}; convert it to BF16 first.")
    if not _counts(shape) or len(shape) > _MAX_DIMENSIONS or not _counts(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{path}: tensor {name!r} has a damaged shape or offsets; download it again.")
    tensor = StoredTensor(name, path, dtype, tuple(shape), data_start + offsets[0])
    if offsets[1] - offsets[0] != tensor.n_bytes:
        raise CheckpointError(f"{path}: tensor {name!r} has offsets that do not fit its shape; download it again.")
    return tensor


def _counts(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def _check_layout(path: Path, tensors: tuple[StoredTensor, ...], data_start: int, size: int) -> None:
    """The format's rule: tensors cover the data without gap or overlap, to the end of the file."""
    position = data_start
    for tensor in sorted(tensors, key=lambda entry: (entry.offset, entry.n_bytes)):
        if tensor.offset != position:
            raise CheckpointError(
                f"{path}: tensor {tensor.name!r} overlaps another or leaves a gap; download it again."
            )
        position += tensor.n_bytes
    if position > size:
        raise CheckpointError(f"{path} is truncated: {size} bytes instead of {position}; download it again.")
    if position < size:
        raise CheckpointError(f"{path} has {size - position} bytes that belong to no tensor; download it again.")
