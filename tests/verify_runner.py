"""`dflash2` with a fault in its runtime: `python verify_runner.py FAULT verify ...`.

The faults are put in here, so that nothing in the package can put them in.
"""

import os
import sys

os.environ.setdefault("DFLASH2_LIBRARY", "stock")

from dflash2.cli import main
from dflash2.native import Outputs
from dflash2.runtime import accept, cycle, sampling

EVERY = 1_000  # accepted drafts to one wrong one


class Due:
    """Whether a fault is due: once for so many accepted drafts."""

    def __init__(self):
        self.accepted = self.faults = 0

    def now(self, holds):
        self.accepted += holds
        if holds or self.accepted < EVERY * (self.faults + 1):
            return False
        self.faults += 1
        return True


def wrong_greedy_accept():
    """One accepted draft in a thousand is not what the target chose."""
    due = Due()

    def greedy(logits, block):
        tokens = []
        for row in range(len(block)):
            token = int(logits[row].argmax())
            if row + 1 < len(block) and due.now(token == block[row + 1]):
                token = block[row + 1]
            tokens.append(token)
            if row + 1 == len(block) or token != block[row + 1]:
                break
        return tokens

    accept.greedy = greedy


def wrong_sampled_accept():
    """The same where tokens are drawn."""
    original, due = sampling.Coupled.choose, Due()

    def choose(self, logits, position, draft):
        token = original(self, logits, position, draft)
        return draft.token if draft is not None and due.now(token == draft.token) else token

    sampling.Coupled.choose = choose


def other_temperature():
    """Rejection takes q for that of another temperature than drafts were drawn at."""
    original = sampling.Rejection._judge

    class Cooled:
        def __init__(self, draft):
            ids, q = draft.q
            weights = q ** (1 / 0.7)
            self.token, self.q = draft.token, (ids, weights / weights.sum())

    def judge(self, candidates, p, position, draft):
        return original(self, candidates, p, position, None if draft is None else Cooled(draft))

    sampling.Rejection._judge = judge


def one_row_too_many():
    """Rollback keeps the first rejected row."""
    original = cycle.rollback

    def rollback(target, drafter, *, block, kept, **rest):
        return original(target, drafter, block=block, kept=min(kept + 1, len(block)), **rest)

    cycle.rollback = rollback


def another_token_s_row():
    """Where only the anchor is kept, its row is that of the draft behind it: off by one, unseen by llama.cpp."""
    original = cycle.rollback

    def rollback(target, drafter, *, block, position, kept, **rest):
        surplus = original(target, drafter, block=block, position=position, kept=kept, **rest)
        if surplus and kept == 1:
            target.truncate(position)
            target.decode_tokens(block[1:2], position, Outputs.LAST)
            return 0
        return surplus

    cycle.rollback = rollback


FAULTS = {
    fault.__name__: fault
    for fault in (wrong_greedy_accept, wrong_sampled_accept, other_temperature, one_row_too_many, another_token_s_row)
}

if __name__ == "__main__":
    name = sys.argv.pop(1)
    if name != "none":
        FAULTS[name]()
    main()
