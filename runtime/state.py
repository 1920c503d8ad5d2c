"""Saved states: what `llama_cpp` saves of the target, and the drafter's memory with it."""

from __future__ import annotations

from copy import copy
from typing import Any

from dflash2 import native

native.library()

from llama_cpp import LlamaState  # noqa: E402


class DFlashState(LlamaState):
    """A `LlamaState` with the drafter's memory, which reaches to position `injected`.

    Without `logits_all` it holds no scores, only one row in the place of them, so that a plain `Llama` takes it too.
    """

    def __init__(self, *, drafter_memory: bytes, injected: int, **target_state: Any) -> None:
        super().__init__(**target_state)
        self.drafter_memory = drafter_memory
        self.injected = injected


def with_scores(state: LlamaState, rows: int) -> LlamaState:
    """`state` with at most `rows` rows of scores, the last ones; an equal state if it has no more."""
    if len(state.scores) <= rows:
        return state
    shortened = copy(state)
    shortened.scores = state.scores[len(state.scores) - rows :]
    return shortened
