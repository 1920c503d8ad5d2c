"""The target's own word: rows of logits from contexts that have no drafter, evaluated in batches of any width."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from dflash2.native import Context, FloatArray, IntArray, Observer, Outputs
from dflash2.runtime import DFlashLlama


@contextmanager
def fresh_context(llm: DFlashLlama, observer: Observer | None = None) -> Iterator[Context]:
    """An empty context on the target of `llm`, closed at the end; raises what `observer` met."""
    context = llm.target_context(observer=observer)
    try:
        yield context
    finally:
        context.close()
    if observer is not None and observer.raised is not None:
        raise observer.raised


def as_tokens(tokens: Sequence[int] | IntArray) -> IntArray:
    """Token ids as llama.cpp takes them."""
    return np.asarray(tokens, np.int32)


def feed(context: Context, tokens: IntArray, start: int, width: int) -> None:
    """Evaluate `tokens` [n] at `start`..., `width` at a time; the logits of the last one are there afterwards."""
    for first in range(0, len(tokens), width):
        context.decode_tokens(tokens[first : first + width], start + first, Outputs.LAST)


def rows(context: Context, tokens: IntArray, start: int, widths: Sequence[int]) -> Iterator[FloatArray]:
    """Logits [vocabulary] after each of `tokens` [n] at `start`..., evaluated in batches as wide as `widths` say.

    The last width counts for all that follow. A row is valid until the next one is asked for.
    """
    first, turn = 0, 0
    while first < len(tokens):
        batch = tokens[first : first + widths[min(turn, len(widths) - 1)]]
        context.decode_tokens(batch, start + first, Outputs.ALL)
        yield from context.logits()
        first, turn = first + len(batch), turn + 1
