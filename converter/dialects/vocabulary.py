"""A reduced draft vocabulary: which target token each row of the drafter's own head stands for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dflash2.converter.sources import Computed, Source, Stored
from dflash2.errors import CheckpointError

OFFSETS = "d2t"
MEMBERS = "t2d"
_OFFSET_TYPES: dict[str, str] = {"I64": "<i8", "I32": "<i4"}
_MEMBER_TYPES: dict[str, str] = {"BOOL": "?", "U8": "?"}


def target_ids(folder: Path, stored: Mapping[str, Source], rows: int, vocab_size: int) -> Computed:
    """Absolute target ids of the `rows` of the head, as GGUF holds them, from `d2t`, which holds id minus row.

    Raises CheckpointError if they are missing, repeat, leave the vocabulary, or disagree with the mask `t2d`.
    """
    if OFFSETS not in stored:
        raise CheckpointError(
            f"{folder} lacks the tensor {OFFSETS!r}, without which a head of {rows} rows for {vocab_size} tokens"
            " cannot be read; download it again."
        )
    offsets = stored[OFFSETS]
    ids = _values(offsets, _OFFSET_TYPES, (rows,)).astype(np.int64) + np.arange(rows)
    where = offsets.label
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise CheckpointError(f"{where} leads out of the vocabulary of {vocab_size} tokens; it must hold id minus row.")
    if len(np.unique(ids)) != rows:
        raise CheckpointError(f"{where} names a token twice; it must hold id minus row.")
    if MEMBERS in stored:
        members = _values(stored[MEMBERS], _MEMBER_TYPES, (vocab_size,))
        if not np.array_equal(np.flatnonzero(members), np.sort(ids)):
            raise CheckpointError(f"{where} and {MEMBERS!r} name different tokens; download the checkpoint again.")
    return Computed(ids, where)


def _values(source: Source, types: Mapping[str, str], shape: tuple[int, ...]) -> npt.NDArray[np.generic]:
    dtype = source.tensor.dtype if isinstance(source, Stored) else "computed"
    if not isinstance(source, Stored) or dtype not in types or source.shape != shape:
        raise CheckpointError(
            f"{source.label} is {dtype} {list(source.shape)}, not {' or '.join(types)} {list(shape)}."
        )
    return source.tensor.read(0, source.tensor.n_bytes).view(types[dtype])
