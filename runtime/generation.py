"""What one call of `generate` does with a `DFlashLlama`: reuse, evaluate, then cycles, until closed."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np

from dflash2.errors import EmptyPromptError
from dflash2.native import IntArray
from dflash2.runtime.cycle import cycles
from dflash2.runtime.request import Request

# Sees the tokens processed so far and the logits of the last one; true ends the generation.
Criteria = Callable[[IntArray, Any], bool]


def generation(
    llama: Any, tokens: Sequence[int], request: Request, *, reset: bool, criteria: Criteria | None
) -> Generator[int, Sequence[int] | None, None]:
    """Yield the tokens that follow `tokens`, or with `reset=False` those that follow the present ones and `tokens`.

    Raises EmptyPromptError if there is nothing to follow, ContextLimitError and NativeError.
    """
    llama._break_off()
    llama._adopt()
    llama._session.pin(request.fixes_depth)
    pending = _reuse(llama, list(tokens)) if reset else list(tokens)
    if not pending and not _is_present(llama):
        pending = _last_again(llama)
    while True:
        pending = yield from _continue(llama, pending, request, criteria)
        if not pending:
            return


def _reuse(llama: Any, tokens: list[int]) -> list[int]:
    """Keep what the memories share with `tokens`; returns the rest, nothing if the present logits are theirs."""
    shared = _shared_length(llama.input_ids[: llama.n_tokens], tokens)
    session = llama._session
    session.settle()
    whole = shared == len(tokens)
    covered = session.injection.reached == shared or not session.injecting
    if whole and covered and shared == llama.n_tokens and _is_present(llama):
        return []
    llama.n_tokens = 0  # until it is known: should an interrupt come, nothing is taken for granted
    kept = session.reuse(shared - whole) if shared > whole else 0
    if kept <= 0:
        llama.reset()
        return tokens
    llama.n_tokens = kept
    llama._requires_eval = True
    return tokens[kept:]


def _is_present(llama: Any) -> bool:
    """Whether the logits behind the last token processed are there."""
    return llama.n_tokens > 0 and not llama._requires_eval and bool(llama._session.holds(llama.n_tokens))


def _stops(llama: Any, request: Request, criteria: Criteria) -> bool:
    logits = request.logits()
    if not llama._logits_all:  # `Llama` asks the criteria once more at the end, with this row
        llama.scores[0] = logits
    return bool(llama._turns.call(criteria, llama._input_ids, logits))


def _shared_length(known: IntArray, tokens: list[int]) -> int:
    n = min(len(known), len(tokens))
    differs = np.flatnonzero(known[:n] != np.asarray(tokens[:n], np.int32))
    return int(differs[0]) if len(differs) else n


def _last_again(llama: Any) -> list[int]:
    """Step back one token, to have its logits; returns it."""
    if llama.n_tokens == 0:
        raise EmptyPromptError("the prompt is empty: there is no token to continue; give at least one.")
    llama.n_tokens -= 1
    return [int(llama.input_ids[llama.n_tokens])]


def _continue(
    llama: Any, tokens: list[int], request: Request, criteria: Criteria | None
) -> Generator[int, Sequence[int] | None, list[int]]:
    """Process `tokens` and generate; returns what to process next, nothing once a criterion stops."""
    if tokens:
        llama.eval(tokens)
    request.evaluated(llama._session.surplus)
    if llama._logits_all and not tokens:
        llama.scores[llama.n_tokens - 1] = request.logits()
    token = request.choose()
    drafted = llama._drafted = cycles(llama._session, token, request)
    try:
        while True:
            if criteria is not None and _stops(llama, request, criteria):
                return []
            llama._session.recorder.emitted += 1
            sent = yield token
            if sent is not None:
                return [token, *sent]
            following = next(drafted, None)
            if following is None:  # broken off to look at the memories
                return [token]
            token = following
    finally:
        drafted.close()
