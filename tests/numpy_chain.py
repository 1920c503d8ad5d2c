"""llama-cpp-python's sampler chain written down in numpy, in double precision, without looking at llama.cpp's."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

Allowed = Callable[[tuple[int, ...]], np.ndarray]


@dataclass(frozen=True)
class Chain:
    """Arguments of `generate`; `allowed` says, after the tokens so far, which a grammar allows [vocabulary]."""

    temp: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    allowed: Allowed | None = None

    def probabilities(self, logits: np.ndarray, so_far: Sequence[int]) -> np.ndarray:
        """p [vocabulary] of the token after `so_far`, the tokens generated up to here."""
        logits = logits.astype(np.float64)
        for token in set(so_far):
            factor = self.repeat_penalty
            logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
            logits[token] -= list(so_far).count(token) * self.frequency_penalty + self.presence_penalty
        if self.allowed is not None:
            logits[~self.allowed(tuple(so_far))] = -np.inf
        order = np.argsort(-logits)
        ranked = logits[order]
        kept = np.ones(len(ranked), bool)
        if self.top_k > 0:
            kept[self.top_k :] = False
        p = _softmax(np.where(kept, ranked, -np.inf))
        kept &= np.cumsum(p) - p < self.top_p  # the token that crosses top_p stays
        kept &= p >= self.min_p * p[0]
        result = np.zeros(len(logits))
        result[order] = _softmax(np.where(kept, ranked, -np.inf) / self.temp)
        return result


def _softmax(values: np.ndarray) -> np.ndarray:
    weights = np.exp(values - values.max())
    return weights / weights.sum()
