"""Plain tokens: one evaluation each, where drafts would not pay."""

from __future__ import annotations

from collections.abc import Generator

from dflash2.native import Outputs
from dflash2.runtime.accept import Request
from dflash2.runtime.session import Session


def plain(session: Session, anchor: int, request: Request) -> Generator[int, None, int]:
    """Yield the token after `anchor`, and those that need no plan of their own after it; returns the last one.

    Nothing is ever rolled back, so it may be closed at any token. Raises NativeError.
    """
    clock, block = session.recorder, session.block[:1]
    while True:
        position = request.position
        clock.lap("host")
        session.inject(now=False)
        session.checkpoint_if_due()
        clock.lap("inject")

        block[0] = anchor
        session.length = position + 1
        session.target.decode_tokens(block, position, Outputs.ALL)
        clock.lap("verify")

        request.advance(anchor, 0)
        try:
            anchor = request.choose()
        finally:
            clock.lap("accept")
            session.finish_plain(position)
        yield anchor
        clock.lap("host")
        if not session.coasts(position + 1):
            return anchor
