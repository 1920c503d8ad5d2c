"""Draft: one drafter pass over the block `[anchor, MASK, MASK, ...]`."""

from __future__ import annotations

from dflash2.native import Context, FloatArray, IntArray, Outputs


def draft(drafter: Context, block: IntArray, position: int, *, lattice: bool) -> FloatArray:
    """Run `block` [B] at `position`... and return what `select` reads, one row per drafted position.

    With `lattice` (a drafter with selector): rows [B - 1, hidden size], see `select`; no logits are copied.
    Without: logits [B - 1, vocabulary]. The view is valid until the drafter's next call. Raises NativeError.
    """
    drafter.decode_tokens(block, position, Outputs.NONE if lattice else Outputs.ALL)
    rows = drafter.lattice() if lattice else drafter.logits()
    return rows[1:]
