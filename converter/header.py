"""The header of a GGUF file as bytes: metadata and tensor table.

Why not `gguf.GGUFWriter`: it packs every element of an array on its own, 7 s for a vocabulary of 248k tokens, and
it cannot say how long the header will be before it is written. Layout: docs/gguf.md of the ggml project.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
from gguf.constants import GGUF_DEFAULT_ALIGNMENT, GGUF_MAGIC, GGUF_VERSION, GGMLQuantizationType, GGUFValueType

from dflash2.converter.entry import STRING, Entry
from dflash2.gguf_info import NUMPY_TYPES, ValueType

# Name, shape (outermost first), type, offset from the begin of the data.
TensorRow = tuple[str, tuple[int, ...], GGMLQuantizationType, int]


def header(architecture: str, metadata: Sequence[Entry], tensors: Sequence[TensorRow]) -> bytes:
    """The whole header, padded so that tensor data may follow.

    Text goes out as the bytes it was read from (surrogate escapes), which need not be UTF-8.
    """
    entries = (Entry("general.architecture", architecture, STRING), *metadata)
    parts = [struct.pack("<IIQQ", GGUF_MAGIC, GGUF_VERSION, len(tensors), len(entries))]
    for entry in entries:
        parts += [_string(entry.key), _typed(entry.value, entry.type) if entry.encoded is None else entry.encoded]
    for name, shape, kind, offset in tensors:
        parts += [_string(name), struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, offset)]
    return padded(b"".join(parts))


def padded(data: bytes) -> bytes:
    """`data` with zeros up to the next aligned place."""
    return data + bytes(aligned(len(data)) - len(data))


def aligned(n_bytes: int) -> int:
    """The next place where tensor data may begin."""
    return -(-n_bytes // GGUF_DEFAULT_ALIGNMENT) * GGUF_DEFAULT_ALIGNMENT


def _typed(value: object, kind: ValueType) -> bytes:
    if kind.element is None:
        return struct.pack("<I", kind.kind) + _scalars((value,), kind.kind)
    assert isinstance(value, tuple)
    return struct.pack("<IIQ", kind.kind, kind.element, len(value)) + _scalars(value, kind.element)


def _scalars(values: tuple[object, ...], kind: GGUFValueType) -> bytes:
    if kind is GGUFValueType.STRING:
        return b"".join(map(_string, values))
    return np.array(values, NUMPY_TYPES[kind]).tobytes()


def _string(text: object) -> bytes:
    assert isinstance(text, str)
    data = text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(data)) + data
