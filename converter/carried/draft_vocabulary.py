"""Which tokens the trimmed head of a drafter has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf.constants import TokenType

from dflash2.converter.carried.frequencies import count_tokens
from dflash2.converter.config import DrafterConfig
from dflash2.errors import DraftVocabularyError
from dflash2.gguf_info import GGUFInfo

_TOKENS = "tokenizer.ggml.tokens"
_TOKEN_TYPES = "tokenizer.ggml.token_type"
_SPECIAL_TYPES = (TokenType.CONTROL, TokenType.USER_DEFINED)
_ID_PREFIX, _ID_SUFFIX = "tokenizer.ggml.", "_token_id"
# Ids that `tokenizer.ggml.*_token_id` names but no text ends with or begins with.
_NOT_SPECIAL = ("mask",)


@dataclass(frozen=True)
class DraftVocabulary:
    """A head trimmed to `size` tokens, those most frequent in `files` (see `frequencies.count_tokens`)."""

    size: int
    files: tuple[Path, ...]


@dataclass(frozen=True)
class ChosenTokens:
    """Token `ids`, ascending, and what a user should know of the choice."""

    ids: npt.NDArray[np.int64]
    notes: tuple[str, ...]


def choose_tokens(wanted: DraftVocabulary, target: GGUFInfo, config: DrafterConfig) -> ChosenTokens:
    """The mask token, all special tokens of the target, then the most frequent ones; ties and rests by lowest id.

    Raises DraftVocabularyError if the size does not fit, or a file cannot be used.
    """
    specials = special_tokens(target) | {config.mask_token_id}
    vocab_size = config.vocab_size
    _check_size(wanted, vocab_size, len(specials), config.selector.top_k if config.selector else 1)
    counts = count_tokens(wanted.files, target.path, vocab_size)
    is_special = np.zeros(vocab_size, bool)
    is_special[list(specials)] = True
    # The last key counts most: special ones, then frequent ones, then low ids.
    order = np.lexsort((np.arange(vocab_size), -counts, ~is_special))
    ids = np.sort(order[: wanted.size]).astype(np.int64)
    return ChosenTokens(ids, tuple(_notes(ids, counts, is_special)))


def _notes(
    ids: npt.NDArray[np.int64], counts: npt.NDArray[np.int64], is_special: npt.NDArray[np.bool_]
) -> Iterator[str]:
    total = int(counts.sum())
    covered = int(counts[ids].sum()) / total if total else 0.0
    yield (
        f"The drafter proposes {len(ids)} of {len(counts)} tokens, {100 * covered:.2f}% of those in the given"
        " frequencies; the output is the target's all the same."
    )
    filler = int((~is_special[ids] & (counts[ids] == 0)).sum())
    if filler:
        yield f"{filler} tokens of the draft vocabulary never occur in the given frequencies: lowest ids fill it up."


def special_tokens(target: GGUFInfo) -> set[int]:
    """Control and user-defined tokens, and every id the tokenizer's keys name (end of text, end of turn, ...)."""
    tokens, types = target.metadata.get(_TOKENS), target.metadata.get(_TOKEN_TYPES)
    n_tokens = len(tokens) if isinstance(tokens, tuple) else 0
    specials = {i for i, kind in enumerate(types) if kind in _SPECIAL_TYPES} if isinstance(types, tuple) else set()
    for key, value in target.metadata.items():
        name = key.removeprefix(_ID_PREFIX).removesuffix(_ID_SUFFIX)
        if f"{_ID_PREFIX}{name}{_ID_SUFFIX}" == key and name not in _NOT_SPECIAL and isinstance(value, int):
            specials.add(value)
    # Absent ids are sometimes written as -1 (4294967295).
    return {token for token in specials if 0 <= token < n_tokens}


def _check_size(wanted: DraftVocabulary, vocab_size: int, n_specials: int, top_k: int) -> None:
    if not wanted.files:
        raise DraftVocabularyError(
            "A draft vocabulary needs a list of token frequencies or a text to take the most frequent tokens from"
            " (--draft-vocab-from FILE)."
        )
    if wanted.size > vocab_size:
        raise DraftVocabularyError(
            f"A draft vocabulary of {wanted.size} tokens is more than the target's {vocab_size}; ask for fewer."
        )
    for least, reason in (
        (top_k, f"the selector ranks {top_k} candidates per position"),
        (n_specials, f"the mask token and the target's special tokens are {n_specials} already"),
    ):
        if wanted.size < least:
            raise DraftVocabularyError(
                f"A draft vocabulary of {wanted.size} tokens is too small: {reason}; ask for at least"
                f" {max(top_k, n_specials)}."
            )
