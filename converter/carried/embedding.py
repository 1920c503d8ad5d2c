"""Copies of the target's embeddings and head, bytes as they are: whole, some rows, or with one row replaced.

What llama.cpp otherwise takes from the target at run time (src/models/dflash.cpp): `token_embd.weight`, `output.weight`
(the embeddings again if the target is tied) and, for an NVFP4 head, its scale. Nothing else of the target reaches the
drafter's graph: a head bias, scale of embeddings or softcap of the target does not, shared or copied.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import quantize
from typing_extensions import override

from dflash2.converter.gguf_rows import GGUFRows
from dflash2.converter.sources import Bytes, Derived, Floats, Source, row_length
from dflash2.errors import CheckpointError, GGUFError, TargetMismatchError
from dflash2.gguf_info import GGUFInfo, read_gguf_info

EMBEDDING, HEAD = "token_embd.weight", "output.weight"
# Read by the loader for an NVFP4 head alone.
_HEAD_SCALES = ("output.scale", "output.input_scale")

_Type = GGMLQuantizationType
# Holds whatever a block-quantised table holds, closer than BF16.
_FALLBACK = _Type.F16
_F16_MAX = 65504.0
_WIDE = (_Type.F32, _Type.BF16)
_SHARD = re.compile(r"(?P<stem>.+)-00001-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True)
class SelectedRows(Derived):
    """Rows `ids` (ascending) of a matrix, in that order."""

    ids: npt.NDArray[np.int64]

    @property
    @override
    def shape(self) -> tuple[int, ...]:
        return (len(self.ids), row_length(self.source))

    @override
    def raw(self, start: int, count: int) -> Bytes:
        return np.concatenate([self.source.raw(*run) for run in self._runs(start, count)])

    @override
    def rows(self, start: int, count: int) -> Floats:
        return np.concatenate([self.source.rows(*run) for run in self._runs(start, count)])

    def _runs(self, start: int, count: int) -> Iterator[tuple[int, int]]:
        """First row and count of neighbours, so that they are read at once."""
        chosen = self.ids[start : start + count]
        for run in np.split(chosen, np.flatnonzero(np.diff(chosen) != 1) + 1):
            yield int(run[0]), len(run)


@dataclass(frozen=True)
class ReplacedRow(Derived):
    """A matrix with the values `vector` in place of row `row`.

    The other rows keep their bytes where the vector can be encoded as their type; otherwise all become F16.
    """

    row: int
    vector: Floats

    @property
    @override
    def raw_type(self) -> GGMLQuantizationType | None:
        stored = self.source.raw_type
        return stored if stored is None or _can_quantize(stored) else _FALLBACK

    @property
    def note(self) -> str | None:
        """What a user should know: that the table had to change its type."""
        stored, written = self.source.raw_type, self.raw_type
        if stored is None or written is None or stored == written:
            return None
        return (
            f"{self.label} is carried as {written.name}, not {stored.name}: the mask token's own row cannot be"
            f" encoded as {stored.name} here."
        )

    @override
    def raw(self, start: int, count: int) -> Bytes:
        wanted = self.raw_type
        if wanted is None or wanted != self.source.raw_type:
            rows = self.rows(start, count)
            return rows.reshape(-1).view(np.uint8) if wanted is None else _encoded(rows, wanted)
        data = self.source.raw(start, count).reshape(count, -1)
        if start <= self.row < start + count:
            data = data.copy()
            data[self.row - start] = _encoded(self.vector[None], wanted)
        return data.reshape(-1)

    @override
    def rows(self, start: int, count: int) -> Floats:
        rows = self.source.rows(start, count)
        if start <= self.row < start + count:
            rows = rows.copy()
            rows[self.row - start] = self.vector
        return rows


@cache
def _can_quantize(stored: GGMLQuantizationType) -> bool:
    """Whether the gguf package writes this type; K-quants it only reads."""
    try:
        quantize(np.zeros((1, GGML_QUANT_SIZES[stored][0]), np.float32), stored)
    except NotImplementedError:
        return False
    return True


def _encoded(rows: Floats, wanted: GGMLQuantizationType) -> Bytes:
    return np.ascontiguousarray(quantize(rows, wanted)).reshape(-1).view(np.uint8)


def embedding_with_mask_row(embedding: Source, mask_token_id: int, vector: Floats) -> ReplacedRow:
    """Embeddings [vocabulary, hidden size] whose mask token has the values `vector` [hidden size] instead of its own.

    Raises CheckpointError if the vector does not fit, or does not fit into the type of the table.
    """
    if vector.shape != embedding.shape[1:] or not 0 <= mask_token_id < embedding.shape[0]:
        raise CheckpointError(
            f"the mask embedding has shape {list(vector.shape)} and is for token {mask_token_id}; the embeddings have"
            f" {embedding.shape[0]} rows of {embedding.shape[1]} values."
        )
    replaced = ReplacedRow(embedding, mask_token_id, vector.astype(np.float32))
    limit = np.finfo(np.float32).max if replaced.raw_type in _WIDE else _F16_MAX
    if not (np.abs(replaced.vector) <= limit).all():
        raise CheckpointError(
            f"the mask embedding has values that are not finite, or beyond +-{limit:.0f}, the most that the embeddings'"
            " type holds; download it again."
        )
    return replaced


@dataclass(frozen=True)
class TargetTables:
    """What a drafter shares with its target: `head` is None if the target uses its embeddings as head (tied).

    `scales` (name, source) belong to the head, `shards` are the headers of the target's files.
    """

    embedding: GGUFRows
    head: GGUFRows | None
    scales: tuple[tuple[str, GGUFRows], ...]
    shards: tuple[GGUFInfo, ...]

    @property
    def files(self) -> tuple[Path, ...]:
        """The target's files."""
        return tuple(info.path for info in self.shards)

    @property
    def head_rows(self) -> GGUFRows:
        """The matrix that gives the logits."""
        return self.head or self.embedding


def read_tables(path: Path, vocab_size: int, hidden_size: int) -> TargetTables:
    """Embeddings and head of the target GGUF at `path`, of a split one: its first file.

    Raises GGUFError if it is no GGUF, or a file of a split target or a tensor is missing, TargetMismatchError for
    another shape.
    """
    if path.is_dir():
        raise GGUFError(f"{path} is a folder; embeddings and head are copied from the target's GGUF file: give that.")
    shards = _shards(read_gguf_info(path))
    embedding, head = _find(shards, EMBEDDING), _find(shards, HEAD)
    if embedding is None:
        raise GGUFError(f"{path} has no tensor {EMBEDDING!r}; give a GGUF of a whole language model.")
    for table in (embedding, head):
        if table is not None:
            _check(table, (vocab_size, hidden_size))
    scales = []
    if head is not None and head.raw_type is _Type.NVFP4:
        scales = [(name, found) for name in _HEAD_SCALES if (found := _find(shards, name))]
    return TargetTables(embedding, head, tuple(scales), shards)


def _check(table: GGUFRows, shape: tuple[int, int]) -> None:
    if table.shape != shape:
        raise TargetMismatchError(
            f"{table.label} has shape {list(table.shape)}, the drafter needs {list(shape)}; use its own target."
        )
    if shape[1] % GGML_QUANT_SIZES[table.raw_type][0]:
        raise GGUFError(f"{table.label} has rows that are no whole blocks of {table.raw_type.name}; copy it again.")


def _find(shards: tuple[GGUFInfo, ...], name: str) -> GGUFRows | None:
    for info in shards:
        if name in info.tensor_names:
            return GGUFRows(info.path, info.tensor(name))
    return None


def _shards(info: GGUFInfo) -> tuple[GGUFInfo, ...]:
    """The headers of all files of a target; raises GGUFError naming a file that is not there."""
    count = info.integer("split.count") or 1
    if count < 2:
        return (info,)
    match = _SHARD.fullmatch(info.path.name)
    if match is None or int(match["count"]) != count:
        raise GGUFError(
            f"{info.path} is the first of {count} files of a split GGUF, but is not named"
            f" ...-00001-of-{count:05d}.gguf; give the files their own names again."
        )
    others = [info.path.with_name(f"{match['stem']}-{i:05d}-of-{count:05d}.gguf") for i in range(2, count + 1)]
    for path in others:
        if not path.is_file():
            raise GGUFError(f"{path} is missing: the target is split into {count} files; put them into one folder.")
    return (info, *map(read_gguf_info, others))
