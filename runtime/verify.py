"""Verify: one target pass over the anchor and the proposed tokens."""

from __future__ import annotations

from dflash2.native import Context, FloatArray, IntArray, Outputs


def verify(target: Context, block: IntArray, position: int) -> FloatArray:
    """Logits [w, vocabulary] of `block` [w] at `position`...: row i decides the token after block[i].

    The view is valid until the target's next call. Raises NativeError.
    """
    target.decode_tokens(block, position, Outputs.ALL)
    return target.logits()
