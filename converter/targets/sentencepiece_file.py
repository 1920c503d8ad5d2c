"""The pieces of a SentencePiece model file (tokenizer.model): a protobuf message of which three fields are needed.

Message: sentencepiece_model.proto of the sentencepiece project; wire format: protobuf's encoding documentation.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dflash2.errors import CheckpointError
from dflash2.regular_file import open_file

# ModelProto.pieces, and SentencePiece's own fields.
_PIECES = 1
_TEXT, _SCORE, _TYPE = 1, 2, 3
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
NORMAL = 1
_Value = int | bytes


@dataclass(frozen=True)
class Piece:
    """One token: its text, score (log probability or minus rank) and type (numbers as in GGUF's token types)."""

    text: str
    score: float
    type: int


def read_pieces(path: Path) -> list[Piece]:
    """All pieces in order of their ids; raises CheckpointError if the file is no SentencePiece model."""
    try:
        with open_file(path) as file:
            data = file.read()
        pieces = [_piece(value) for field, value in _fields(data) if field == _PIECES and isinstance(value, bytes)]
    except OSError as error:
        raise CheckpointError(f"Cannot read {path}: {error.strerror or error}.") from error
    except (ValueError, IndexError, struct.error) as error:
        raise CheckpointError(f"{path} is not a SentencePiece model; download it again.") from error
    if not pieces:
        raise CheckpointError(f"{path} is not a SentencePiece model; download it again.")
    return pieces


def _piece(data: bytes) -> Piece:
    values = dict(_fields(data))
    text, score, kind = values.get(_TEXT, b""), values.get(_SCORE, bytes(4)), values.get(_TYPE, NORMAL)
    if not isinstance(text, bytes) or not isinstance(score, bytes) or not isinstance(kind, int):
        raise ValueError("field of another type")
    return Piece(text.decode("utf-8"), struct.unpack("<f", score)[0], kind)


def _fields(data: bytes) -> Iterator[tuple[int, _Value]]:
    """(field number, value) pairs; numbers are ints, everything else bytes."""
    position = 0
    while position < len(data):
        tag, position = _varint(data, position)
        wire = tag & 7
        if wire == _VARINT:
            value, position = _varint(data, position)
            yield tag >> 3, value
            continue
        if wire == _BYTES:
            size, position = _varint(data, position)
        else:
            size = {_FIXED64: 8, _FIXED32: 4}[wire] if wire in (_FIXED64, _FIXED32) else -1
        if size < 0 or size > len(data) - position:
            raise ValueError("bad field")
        yield tag >> 3, data[position : position + size]
        position += size


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """A little-endian base-128 number and the position behind it."""
    number = shift = 0
    while True:
        byte = data[position]
        number |= (byte & 0x7F) << shift
        position += 1
        if byte < 0x80:
            return number, position
        shift += 7
        if shift > 63:
            raise ValueError("number too long")
