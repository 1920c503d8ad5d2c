"""What a drafter carries instead of sharing it with its target: embeddings, head, a head of fewer tokens.

The loader (src/models/dflash.cpp of the pinned llama.cpp) takes all of these; `d2t` says which token a row of a trimmed
head stands for. Selector codebooks and embeddings keep the whole vocabulary: their rows are looked up by token id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dflash2.converter.carried.draft_vocabulary import DraftVocabulary, choose_tokens
from dflash2.converter.carried.embedding import (
    EMBEDDING,
    HEAD,
    SelectedRows,
    TargetTables,
    embedding_with_mask_row,
    read_tables,
)
from dflash2.converter.config import DrafterConfig
from dflash2.converter.plan import PlannedTensor, TensorPlan
from dflash2.converter.sources import Computed, Floats, Source
from dflash2.errors import UnsupportedCheckpointError

VOCABULARY_MAP = "d2t"

Ids = npt.NDArray[np.int64]


def with_target_tensors(
    plan: TensorPlan,
    folder: Path,
    config: DrafterConfig,
    target: Path,
    *,
    whole: bool,
    draft_vocab: DraftVocabulary | None,
    mask_embedding: Sequence[float] | None = None,
) -> tuple[TensorPlan, tuple[Path, ...]]:
    """The plan of the checkpoint in `folder` with what it shall carry of the GGUF `target`, and the files read for it.

    `whole`: embeddings and head. `mask_embedding` [hidden size]: what the mask token is embedded as, in place of its
    row of the target's embeddings; implies `whole`. Raises what `read_tables`, `choose_tokens` and `carry` raise.
    """
    if not whole and draft_vocab is None and mask_embedding is None:
        return plan, ()
    tables = read_tables(target, config.vocab_size, config.hidden_size)
    chosen = choose_tokens(draft_vocab, tables.shards[0], config) if draft_vocab else None
    mask_row = None if mask_embedding is None else (config.mask_token_id, np.array(mask_embedding, np.float32))
    carried = carry(plan, folder, tables, whole=whole, kept=chosen.ids if chosen else None, mask_row=mask_row)
    notes, files = (chosen.notes, draft_vocab.files) if chosen and draft_vocab else ((), ())
    return replace(carried, notes=(*carried.notes, *notes)), (*tables.files, *files)


def carry(
    plan: TensorPlan,
    folder: Path,
    tables: TargetTables,
    *,
    whole: bool,
    kept: Ids | None = None,
    mask_row: tuple[int, Floats] | None = None,
) -> TensorPlan:
    """The plan of the checkpoint in `folder` with copies of the target's `tables`.

    Args:
        plan: what the checkpoint itself holds; its own embeddings and head go before the target's.
        folder: for errors.
        tables: the target's.
        whole: carry embeddings and head, so that nothing is shared.
        kept: token ids (ascending) that the head shall have, None for all.
        mask_row: the mask token and what its embedding [hidden size] shall be; implies `whole`.

    Raises UnsupportedCheckpointError if the checkpoint's own head has a reduced vocabulary already, CheckpointError
    for a mask row that does not fit.
    """
    own = {tensor.name: tensor.source for tensor in plan.tensors if tensor.name in (EMBEDDING, HEAD, VOCABULARY_MAP)}
    if VOCABULARY_MAP in own and kept is not None:
        raise UnsupportedCheckpointError(
            f"{folder} has a reduced draft vocabulary of its own, which --draft-vocab would have to cut again;"
            " leave --draft-vocab out."
        )
    notes: list[str] = []
    carried: dict[str, Source] = {}
    if whole or mask_row is not None:
        carried |= _tables(own, tables)
        notes.append(_note(carried, tables))
    if mask_row is not None:
        # A tied head must not see the replaced row.
        carried.setdefault(HEAD, own.get(HEAD) or carried.get(HEAD) or own.get(EMBEDDING) or tables.head_rows)
        replaced = embedding_with_mask_row(carried.get(EMBEDDING) or own[EMBEDDING], *mask_row)
        carried[EMBEDDING] = replaced
        notes += [replaced.note] if replaced.note else []
    if kept is not None:
        head = own.get(HEAD) or own.get(EMBEDDING) or tables.head_rows
        carried[HEAD] = SelectedRows(head, kept)
        carried[VOCABULARY_MAP] = Computed(kept, "the draft vocabulary")
    if HEAD in carried and HEAD not in own and EMBEDDING not in own:
        carried |= dict(tables.scales)
    return _with(plan, carried, tuple(notes))


def _tables(own: dict[str, Source], tables: TargetTables) -> dict[str, Source]:
    """What the checkpoint lacks of embeddings and head; a tied head is the embeddings, once."""
    if EMBEDDING in own:
        return {}
    carried: dict[str, Source] = {EMBEDDING: tables.embedding}
    if HEAD not in own and tables.head is not None:
        carried[HEAD] = tables.head
    return carried


def _note(carried: dict[str, Source], tables: TargetTables) -> str:
    if not carried:
        return "The checkpoint has embeddings and head of its own: nothing was taken from the target."
    names = {EMBEDDING: "embeddings", HEAD: "head"}
    parts = " and ".join(names[name] for name in carried)
    tied = " (also its head)" if HEAD not in carried and tables.head is None else ""
    return f"Carries the target's {parts}{tied}, bytes as they are; use it with this target alone."


def _with(plan: TensorPlan, carried: dict[str, Source], notes: tuple[str, ...]) -> TensorPlan:
    """The plan with the carried tensors first, in place of those of the same name."""
    first = tuple(PlannedTensor(name, source) for name, source in carried.items())
    kept = tuple(tensor for tensor in plan.tensors if tensor.name not in carried)
    return replace(plan, tensors=(*first, *kept), notes=(*plan.notes, *notes))
