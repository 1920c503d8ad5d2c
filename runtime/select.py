"""Select: walk from the anchor through the candidates of each position."""

from __future__ import annotations

import numpy as np

from dflash2.native import FloatArray, IntArray


def select(rows: FloatArray, top_k: int) -> IntArray:
    """Proposed tokens [B - 1] from the drafter's `rows`.

    With a selector (`top_k` = K > 0) a row holds K candidate ids as floats, then scores S(a, b) as K x K,
    predecessor-major, then padding; in the first row every predecessor is the anchor. The walk is greedy, not
    Viterbi: b = argmax_b S(a, b), then a = b (`CandidateSelector.select` of the reference at temperature 0).
    Without a selector (K = 0) each row holds logits, and the proposal is their argmax.
    """
    if top_k == 0:
        best_tokens: IntArray = rows.argmax(axis=1).astype(np.int32)
        return best_tokens
    n = len(rows)
    scores = rows[:, top_k : top_k + top_k * top_k].reshape(n, top_k, top_k)
    best = scores.argmax(axis=2).tolist()
    path = []
    at = 0
    for successor in best:
        at = successor[at]
        path.append(at)
    return rows[np.arange(n), path].astype(np.int32)
