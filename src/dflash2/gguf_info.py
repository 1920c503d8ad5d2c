"""One typed reader of a GGUF file's header: metadata with exact types, and the tensor table.

Why not `gguf.GGUFReader`: it keeps two numpy objects per array element, so the header of a target with a
vocabulary of 248k costs seconds and hundreds of megabytes, and it reads past the end of truncated files.
Values are checked when the file is read, and decoded when they are asked for.
Layout: docs/gguf.md of the ggml project; type numbers and block sizes come from the gguf package.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFValueType

from dflash2.errors import GGUFError
from dflash2.regular_file import open_file

Scalar: TypeAlias = "str | int | float | bool"
MetadataValue: TypeAlias = "Scalar | tuple[Scalar, ...]"

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4  # GGML_MAX_DIMS
_LENGTH_BYTES = 8  # u64 before every string
_ARRAY_LENGTH_OFFSET = 8  # behind two type numbers
NUMPY_TYPES = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
}


@dataclass(frozen=True)
class ValueType:
    """Type of a metadata value as stored: `element` is set for arrays only."""

    kind: GGUFValueType
    element: GGUFValueType | None = None


@dataclass(frozen=True)
class TensorInfo:
    """One tensor: `shape` in ggml order (fastest dimension first), `offset` and `n_bytes` in the file."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    offset: int
    n_bytes: int


class Metadata(Mapping[str, MetadataValue]):
    """Metadata by key; `encoded` holds the bytes after each key, decoded on first use."""

    def __init__(self, path: Path, encoded: Mapping[str, bytes]) -> None:
        self._path = path
        self.encoded = encoded
        self._decoded: dict[str, MetadataValue] = {}

    def __getitem__(self, key: str) -> MetadataValue:
        if key not in self._decoded:
            self._decoded[key] = _Cursor(self._path, self.encoded[key]).value()
        return self._decoded[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.encoded)

    def __len__(self) -> int:
        return len(self.encoded)


@dataclass(frozen=True)
class GGUFInfo:
    """Header of one GGUF file; tensor data stays on disk.

    Strings are UTF-8; bytes that are not (some vocabularies) survive as surrogate escapes.
    """

    path: Path
    version: int
    metadata: Mapping[str, MetadataValue] = field(repr=False)
    value_types: Mapping[str, ValueType] = field(repr=False)
    tensors: tuple[TensorInfo, ...] = field(repr=False)

    @property
    def architecture(self) -> str:
        """`general.architecture`; empty if the file names none."""
        return str(self.metadata.get("general.architecture", ""))

    @cached_property
    def tensor_names(self) -> frozenset[str]:
        """Names of all tensors."""
        return frozenset(tensor.name for tensor in self.tensors)

    def tensor(self, name: str) -> TensorInfo:
        """The tensor called `name`; raises GGUFError if the file has none."""
        for tensor in self.tensors:
            if tensor.name == name:
                return tensor
        raise GGUFError(f"{self.path} has no tensor {name!r}.")

    def integer(self, key: str) -> int | None:
        """Metadata integer `key`, None if absent; raises GGUFError if it is of another type."""
        value = self.metadata.get(key)
        if value is None or (isinstance(value, int) and not isinstance(value, bool)):
            return value
        raise GGUFError(f"{self.path}: the metadata key {key!r} is not an integer.")

    def length(self, key: str) -> int | None:
        """Number of values of the array `key`, without reading them; None if absent or no array."""
        kind = self.value_types.get(key)
        if kind is None or kind.element is None:
            return None
        if not isinstance(self.metadata, Metadata):
            value = self.metadata[key]
            return len(value) if isinstance(value, tuple) else None
        return int(struct.unpack_from("<Q", self.metadata.encoded[key], _ARRAY_LENGTH_OFFSET)[0])

    def encoded(self, key: str) -> bytes:
        """The value of `key` as it stands in the file: type, for arrays element type and length, then the values."""
        assert isinstance(self.metadata, Metadata), "metadata that was changed no longer stands in a file"
        return self.metadata.encoded[key]

    def own(self, suffix: str) -> str:
        """Full name of a key of this architecture: `own("block_count")` is `qwen3.block_count`."""
        return f"{self.architecture}.{suffix}"


def decode_value(encoded: bytes) -> MetadataValue:
    """The value that `GGUFInfo.encoded` gave as bytes."""
    return _Cursor(Path(), encoded).value()


def read_gguf_info(path: Path) -> GGUFInfo:
    """Read the header of the GGUF file at `path`; raises GGUFError if it is no complete little-endian GGUF file."""
    try:
        if (Path(path) / "config.json").is_file():
            raise GGUFError(f"{path} is a checkpoint folder, not a GGUF file; convert it first with dflash2-convert.")
        with open_file(Path(path)) as file:
            if file.read(4) != _MAGIC:
                raise GGUFError(f"{path} is not a GGUF file; give the path of a .gguf model.")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(Path(path), data)
    except OSError as error:
        raise GGUFError(f"Cannot read {path}: {error.strerror or error}.") from error


def is_gguf(path: Path) -> bool:
    """Whether `path` is a file that begins as GGUF files do."""
    try:
        with open_file(path) as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def _parse(path: Path, data: mmap.mmap) -> GGUFInfo:
    cursor = _Cursor(path, data, len(_MAGIC))
    version = cursor.u32()
    if version not in _VERSIONS:
        raise GGUFError(
            f"{path} is GGUF version {version} or big-endian; only little-endian versions 2 and 3 are read."
        )
    n_tensors, n_keys = cursor.u64(), cursor.u64()
    encoded: dict[str, bytes] = {}
    value_types: dict[str, ValueType] = {}
    for _ in range(n_keys):
        key = cursor.string()
        if key in encoded:
            raise GGUFError(f"{path} holds the metadata key {key!r} twice; the file is damaged.")
        start = cursor.offset
        value_types[key] = cursor.skip_value()
        encoded[key] = data[start : cursor.offset]
    metadata = Metadata(path, encoded)
    headers = [cursor.tensor_header() for _ in range(n_tensors)]
    start = _data_start(path, metadata, cursor.offset)
    tensors = tuple(_locate(path, header, start, len(data)) for header in headers)
    if len({tensor.name for tensor in tensors}) != len(tensors):
        raise GGUFError(f"{path} holds two tensors of one name; the file is damaged.")
    return GGUFInfo(path, version, metadata, value_types, tensors)


def _data_start(path: Path, metadata: Mapping[str, MetadataValue], end_of_header: int) -> int:
    alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise GGUFError(
            f"{path}: general.alignment is {alignment!r}, which is not a power of two; the file is damaged."
        )
    return -(-end_of_header // alignment) * alignment


@dataclass(frozen=True)
class _TensorHeader:
    name: str
    shape: tuple[int, ...]
    type_number: int
    relative_offset: int


def _locate(path: Path, header: _TensorHeader, start: int, file_bytes: int) -> TensorInfo:
    try:
        ggml_type = GGMLQuantizationType(header.type_number)
    except ValueError as error:
        raise GGUFError(
            f"{path}: tensor {header.name!r} has type number {header.type_number}, unknown to the installed gguf"
            " package; upgrade gguf."
        ) from error
    block, block_bytes = GGML_QUANT_SIZES[ggml_type]
    n_elements = 1
    for size in header.shape:
        n_elements *= size
    tensor = TensorInfo(
        name=header.name,
        shape=header.shape,
        type_name=ggml_type.name,
        offset=start + header.relative_offset,
        n_bytes=n_elements // block * block_bytes,
    )
    if tensor.offset + tensor.n_bytes > file_bytes:
        raise GGUFError(f"{path} is truncated: tensor {tensor.name!r} ends beyond the end of the file; copy it again.")
    return tensor


class _Cursor:
    """Bounds-checked reads, front to back."""

    def __init__(self, path: Path, data: bytes | mmap.mmap, offset: int = 0) -> None:
        self._path = path
        self._data = data
        self._end = len(data)
        self.offset = offset

    def _claim(self, n_bytes: int) -> int:
        """Advance over `n_bytes` and return where they begin."""
        start = self.offset
        if n_bytes > self._end - start:
            raise self._truncated()
        self.offset = start + n_bytes
        return start

    def _truncated(self) -> GGUFError:
        return GGUFError(f"{self._path} is truncated: its header ends at byte {self._end}; copy it again.")

    def u32(self) -> int:
        return int(struct.unpack_from("<I", self._data, self._claim(4))[0])

    def u64(self) -> int:
        return int(struct.unpack_from("<Q", self._data, self._claim(8))[0])

    def string(self) -> str:
        start = self._claim(self.u64())
        return self._data[start : self.offset].decode("utf-8", "surrogateescape")

    def skip_value(self) -> ValueType:
        """Pass over a value; returns its type."""
        kind = self._value_type()
        if kind is not GGUFValueType.ARRAY:
            self._skip(kind, 1)
            return ValueType(kind)
        element = self._value_type()
        self._skip(element, self.u64())
        return ValueType(kind, element)

    def value(self) -> MetadataValue:
        """A value of any type; arrays are tuples."""
        kind = self._value_type()
        if kind is not GGUFValueType.ARRAY:
            return self._values(kind, 1)[0]
        return self._values(self._value_type(), self.u64())

    def _value_type(self) -> GGUFValueType:
        number = self.u32()
        try:
            return GGUFValueType(number)
        except ValueError as error:
            raise GGUFError(f"{self._path}: unknown metadata type {number}; the file is damaged.") from error

    def _skip(self, kind: GGUFValueType, count: int) -> None:
        if kind is GGUFValueType.STRING:
            self._skip_strings(count)
        elif kind is GGUFValueType.ARRAY:
            raise GGUFError(f"{self._path}: arrays of arrays in the metadata are not supported.")
        else:
            self._claim(count * np.dtype(NUMPY_TYPES[kind]).itemsize)

    def _skip_strings(self, count: int) -> None:
        data, position, length = self._data, self.offset, struct.Struct("<Q").unpack_from
        try:
            for _ in range(count):
                position += _LENGTH_BYTES + length(data, position)[0]
        except (struct.error, OverflowError):
            raise self._truncated() from None
        self._claim(position - self.offset)

    def _values(self, kind: GGUFValueType, count: int) -> tuple[Scalar, ...]:
        if kind is GGUFValueType.STRING:
            return tuple(self._strings(count))
        dtype = np.dtype(NUMPY_TYPES[kind])
        start = self._claim(count * dtype.itemsize)
        # tolist gives Python numbers.
        return tuple(np.frombuffer(self._data[start : self.offset], dtype, count).tolist())

    def _strings(self, count: int) -> Iterator[str]:
        """As `string`, written out in one loop: vocabularies have hundreds of thousands."""
        data, end, length = self._data, self._end, struct.Struct("<Q").unpack_from
        for _ in range(count):
            start = self.offset + _LENGTH_BYTES
            stop = start + length(data, self.offset)[0] if start <= end else end + 1
            if stop > end:
                raise self._truncated()
            self.offset = stop
            yield data[start:stop].decode("utf-8", "surrogateescape")

    def tensor_header(self) -> _TensorHeader:
        name = self.string()
        n_dims = self.u32()
        if n_dims > _MAX_DIMENSIONS:
            raise GGUFError(f"{self._path}: tensor {name!r} has {n_dims} dimensions; the file is damaged.")
        shape = tuple(self.u64() for _ in range(n_dims))
        return _TensorHeader(name, shape, self.u32(), self.u64())
