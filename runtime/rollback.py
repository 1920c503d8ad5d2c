"""Rollback: drop what the last cycle put into the memories beyond the accepted tokens."""

from __future__ import annotations

from dflash2.errors import NativeError
from dflash2.native import Bytes, Context, IntArray, Outputs


def rollback(
    target: Context,
    drafter: Context,
    *,
    block: IntArray,
    position: int,
    kept: int,
    injected: int,
    saved: Bytes | None,
) -> int:
    """Keep `kept` rows of the `block` verified at `position` in the target, and `injected` positions in the drafter.

    With `saved`, the target's state before the block, a target without snapshots is put back there and processes the
    kept rows again. The target is touched only when rows were rejected: a recurrent memory can step back once per
    decode, and by its snapshots never to before the block, so with nothing kept (the caller raised) the block stays
    for the next request to clear away. Returns how many rejected rows stand at the end of the target's last batch.
    Raises NativeError if a memory cannot step back.
    """
    if not drafter.truncate(injected):
        raise NativeError(f"the drafter's memory cannot be cut to {injected} positions.")
    rejected = len(block) - kept
    if rejected == 0:
        return 0
    if saved is not None:
        target.restore_part(saved, position)
        if kept:
            target.decode_tokens(block[:kept], position, Outputs.LAST)
        return 0
    if kept == 0 and target.snapshots is not None:
        return 0
    if not target.truncate(position + kept):
        raise NativeError(
            f"the target cannot step back {rejected} tokens: its recurrent state keeps too few snapshots; "
            "lower depth, or set depth=0 for this target."
        )
    return rejected
