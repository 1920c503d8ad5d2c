"""Rollback: drop what the last cycle put into the memories beyond the accepted tokens."""

from __future__ import annotations

from dflash2.errors import NativeError
from dflash2.native import Context


def rollback(target: Context, drafter: Context, *, position: int, rejected: int, injected: int) -> None:
    """Keep `position` tokens in the target, of which the last `rejected` go, and `injected` in the drafter.

    The target is touched only when rows were rejected: a recurrent memory can step back once per decode.
    Raises NativeError if the target's memory cannot step back.
    """
    drafter.truncate(injected)
    if rejected and not target.truncate(position):
        raise NativeError(
            f"the target cannot step back {rejected} tokens: its recurrent state keeps too few snapshots; "
            "lower depth, or set depth=0 for this target."
        )
