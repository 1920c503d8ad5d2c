"""Accept: keep drafts as long as they are what the target chooses itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from dflash2.native import FloatArray, IntArray
from dflash2.runtime.select import Chance, Draft, Proposal


class Request(Protocol):
    """The caller's side of a generation: where it stands and how it chooses tokens.

    Attributes:
        greedy: whether every token is the argmax of its row.
        chance: how drafts are drawn; None for the argmax.
    """

    greedy: bool
    chance: Chance | None

    @property
    def position(self) -> int:
        """Tokens processed so far; the anchor stands here."""

    def advance(self, token: int, row: int) -> None:
        """Note that `token` is processed, as row `row` of the target's last batch: `position` grows by one."""

    def choose(self, draft: Draft | None = None) -> int:
        """The target's token after the row last advanced over, where `draft` was proposed; once per row at most."""


class Acceptance:
    """Iterates over the tokens a verified block yields: the accepted drafts, then one of the target's own.

    A greedy request is judged at once, so `accepted` is final before the first token. Any other is judged while
    it is read: each token is handed out, and the request advanced over it, before the next row is sampled, since
    samplers, penalties and the caller may look at what was accepted.
    """

    def __init__(self, block: IntArray, logits: FloatArray, request: Request, proposal: Proposal) -> None:
        """Judge `block` [w], the anchor and the first w - 1 tokens of `proposal`, by `logits` [w, vocabulary]."""
        self._block = block.tolist()
        self._proposal = proposal
        self._request = request
        self.accepted = 0
        self._tokens = self._judge_greedy(logits) if request.greedy else None

    def _judge_greedy(self, logits: FloatArray) -> list[int]:
        tokens = greedy(logits, self._block)
        self.accepted = len(tokens) - 1
        return tokens

    def __iter__(self) -> Iterator[int]:
        if self._tokens is not None:
            for row, token in enumerate(self._tokens):
                self._request.advance(self._block[row], row)
                yield token
            return
        for row, processed in enumerate(self._block):
            self._request.advance(processed, row)
            drafted = row + 1 < len(self._block)
            token = self._request.choose(self._proposal.draft(row) if drafted else None)
            holds = drafted and token == self._block[row + 1]
            self.accepted += holds
            yield token
            if not holds:
                return


def greedy(logits: FloatArray, block: list[int]) -> list[int]:
    """Accepted drafts and the token after them: argmax of `logits` [w, vocabulary] while it repeats `block` [w]."""
    tokens = []
    for row in range(len(block)):
        token = int(logits[row].argmax())
        tokens.append(token)
        if row + 1 == len(block) or token != block[row + 1]:
            break
    return tokens
