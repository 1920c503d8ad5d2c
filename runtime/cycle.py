"""The loop: inject, draft, select, verify, accept, rollback."""

from __future__ import annotations

from collections.abc import Generator

from dflash2.runtime.accept import Acceptance, Request
from dflash2.runtime.draft import draft
from dflash2.runtime.plain import plain
from dflash2.runtime.rollback import rollback
from dflash2.runtime.select import select
from dflash2.runtime.session import Session
from dflash2.runtime.verify import verify


def cycles(session: Session, anchor: int, request: Request) -> Generator[int, None, None]:
    """Yield the tokens that follow `anchor`, chosen but not yet processed; a cycle may do without drafts.

    Between two tokens the target holds exactly `request.position` accepted ones, plus rows that the next
    evaluation drops; closing the iterator at any token leaves the session ready for the next request.
    Raises ContextLimitError when no token fits any more, and NativeError.
    """
    spec, clock = session.spec, session.recorder
    clock.start()
    while True:
        position = request.position
        step = session.plan(position)
        if not step.depth:
            anchor = yield from plain(session, anchor, request)
            continue
        session.noise[0] = session.block[0] = anchor
        clock.lap("host")

        session.inject(now=True)
        session.checkpoint_if_due()
        clock.lap("inject")

        noise = session.noise[: min(step.block, session.drafter.n_ctx - position)]
        rows = draft(session.drafter, noise, position, lattice=spec.top_k > 0)
        clock.lap("draft")

        proposal = select(rows, spec.top_k, position + 1, request.chance)
        session.block[1 : len(noise)] = proposal.tokens
        saved = session.saved_for_rollback()
        clock.lap("select")

        block = session.block[: 1 + step.depth]
        session.length = position + len(block)
        logits = verify(session.target, block, position)
        clock.lap("verify")

        acceptance = Acceptance(block, logits, request, proposal)
        try:
            for token in acceptance:
                clock.lap("accept")
                yield token
                clock.lap("host")
                anchor = token
        finally:
            clock.start()
            kept = request.position - position
            surplus = rollback(
                session.target,
                session.drafter,
                block=block,
                position=position,
                kept=kept,
                injected=session.injection.reached,
                saved=saved,
            )
            clock.lap("rollback")
            session.finish(position, block, acceptance.accepted, kept, surplus)
