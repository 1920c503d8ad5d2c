"""Logits that a request with logprobs reads afterwards: only of the positions it needs."""

from __future__ import annotations

from typing import Any

import numpy as np

from dflash2.native import FloatArray

_LEAST_ROWS = 16


class PositionRows(np.ndarray[Any, np.dtype[np.float32]]):
    """Rows [n, vocabulary] indexed by position: the first one stands at `first`. What is computed of it keeps that."""

    first: int = 0

    def __array_finalize__(self, origin: Any) -> None:
        self.first = getattr(origin, "first", 0)

    def __getitem__(self, index: Any) -> Any:
        rows, *rest = index if isinstance(index, tuple) else (index,)
        return np.asarray(self)[(self._shifted(rows), *rest)]

    def _shifted(self, rows: Any) -> Any:
        if isinstance(rows, slice):
            return slice(*(None if bound is None else max(bound - self.first, 0) for bound in (rows.start, rows.stop)))
        return rows - self.first if isinstance(rows, int) and rows >= 0 else rows


class KeptScores:
    """Stands in for `Llama.scores` [n_ctx, vocabulary] during a request; holds positions `first` and later.

    Writing takes positions; reading takes `[:n, :]`, as `Llama._scores` does, and gives rows indexed by position.
    """

    def __init__(self, n_vocab: int, *, prompt: bool) -> None:
        """Keep the rows of the whole prompt too, or from its last one on."""
        self.first = 0
        self._prompt = prompt
        self._rows: FloatArray = np.empty((_LEAST_ROWS, n_vocab), np.float32)

    def begin(self, prompt_tokens: int) -> None:
        """Note how long the prompt is."""
        self.first = 0 if self._prompt else max(prompt_tokens - 1, 0)

    def __setitem__(self, positions: int | slice, rows: FloatArray) -> None:
        start, stop = (positions.start, positions.stop) if isinstance(positions, slice) else (positions, positions + 1)
        rows = rows.reshape(-1, self._rows.shape[1])[max(self.first - start, 0) :]
        start, stop = max(start, self.first) - self.first, stop - self.first
        if stop > len(self._rows):
            self._rows = np.concatenate(
                [self._rows, np.empty((max(stop, 2 * len(self._rows)), rows.shape[1]), np.float32)]
            )
        if stop > start:
            self._rows[start:stop] = rows

    def __getitem__(self, index: tuple[slice, slice]) -> PositionRows:
        length = max(index[0].stop - self.first, 0)
        rows = self._rows[:length].view(PositionRows)
        rows.first = self.first
        return rows
