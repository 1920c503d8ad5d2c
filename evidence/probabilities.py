"""The sampler chain written down in numpy, in double precision, without looking at llama.cpp's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dflash2.evidence.engines import Sampling
from dflash2.native import FloatArray

Probabilities = npt.NDArray[np.float64]


def probabilities(sampling: Sampling, logits: FloatArray, so_far: Sequence[int]) -> Probabilities:
    """p [vocabulary] of the token after `so_far`, the tokens generated up to here; at temperature 0 of one token."""
    return truncated(sampling, penalised(sampling, logits, so_far))


def penalised(sampling: Sampling, logits: FloatArray, so_far: Sequence[int]) -> Probabilities:
    """`logits` [vocabulary] after the penalties."""
    result = logits.astype(np.float64)
    for token in set(so_far):
        factor = sampling.repeat_penalty
        result[token] = result[token] / factor if result[token] > 0 else result[token] * factor
        result[token] -= list(so_far).count(token) * sampling.frequency_penalty + sampling.presence_penalty
    return result


def truncated(sampling: Sampling, logits: Probabilities) -> Probabilities:
    """Probabilities [vocabulary] of `logits` after top-k, top-p, min-p and temperature, in this order."""
    result = np.zeros(len(logits))
    if sampling.temperature == 0:
        result[logits.argmax()] = 1.0
        return result
    order = np.argsort(-logits)
    ranked = logits[order]
    kept = np.ones(len(ranked), bool)
    if sampling.top_k > 0:
        kept[sampling.top_k :] = False
    p = _softmax(np.where(kept, ranked, -np.inf))
    kept &= np.cumsum(p) - p < sampling.top_p  # the token that crosses top_p stays
    kept &= p >= sampling.min_p * p[0]
    result[order] = _softmax(np.where(kept, ranked, -np.inf) / sampling.temperature)
    return result


def _softmax(values: Probabilities) -> Probabilities:
    weights: Probabilities = np.exp(values - values.max())
    weights /= weights.sum()
    return weights
