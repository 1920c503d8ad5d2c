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


def target_ids(
    folder: Path, stored: Mapping[str, Source], rows: int, vocab_size: int, said: str | None = None
) -> Computed:
    """Absolute target ids of the `rows` of the head, as GGUF holds them, from `d2t`.

    The speculators package stores id minus row; `said` ("offsets" or "absolute") is the user's word on that. Without
    it, either the mask `t2d` or the order of the ids must prove the package's reading. Raises CheckpointError if it
    is not proven, or if ids are missing, repeat, leave the vocabulary, or disagree with `t2d`.
    """
    if OFFSETS not in stored:
        raise CheckpointError(
            f"{folder} lacks the tensor {OFFSETS!r}, without which a head of {rows} rows for {vocab_size} tokens"
            " cannot be read; download it again."
        )
    source = stored[OFFSETS]
    held = _values(source, _OFFSET_TYPES, (rows,)).astype(np.int64)
    absolute = said == "absolute"
    ids = held if absolute else held + np.arange(rows)
    where = source.label
    must = "it must hold the ids" if absolute else "it must hold id minus row, or the ids with --d2t absolute"
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise CheckpointError(f"{where} leads out of the vocabulary of {vocab_size} tokens; {must}.")
    if len(np.unique(ids)) != rows:
        raise CheckpointError(f"{where} names a token twice; {must}.")
    if MEMBERS in stored:
        members = _values(stored[MEMBERS], _MEMBER_TYPES, (vocab_size,))
        if not np.array_equal(np.flatnonzero(members), np.sort(ids)):
            raise CheckpointError(f"{where} and {MEMBERS!r} name different tokens; download the checkpoint again.")
    elif said is None and not (_ascends(ids) and not _is_list_of_ids(held, vocab_size)):
        raise CheckpointError(
            f"{where} may hold token ids, or ids minus their row, and there is no {MEMBERS!r} to tell; say which with"
            " --d2t offsets|absolute."
        )
    return Computed(ids, where)


def _ascends(ids: npt.NDArray[np.int64]) -> bool:
    return bool((np.diff(ids) > 0).all())


def _is_list_of_ids(held: npt.NDArray[np.int64], vocab_size: int) -> bool:
    """Whether `held` could be token ids themselves, in any order."""
    return bool(held.min() >= 0 and held.max() < vocab_size and len(np.unique(held)) == len(held))


def _values(source: Source, types: Mapping[str, str], shape: tuple[int, ...]) -> npt.NDArray[np.generic]:
    dtype = source.tensor.dtype if isinstance(source, Stored) else "computed"
    if not isinstance(source, Stored) or dtype not in types or source.shape != shape:
        raise CheckpointError(
            f"{source.label} is {dtype} {list(source.shape)}, not {' or '.join(types)} {list(shape)}."
        )
    return source.tensor.read(0, source.tensor.n_bytes).view(types[dtype])
