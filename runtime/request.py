"""One call of `generate`: where it stands, and how it chooses tokens."""

from __future__ import annotations

from typing import Any, Protocol

from dflash2.native import FloatArray, IntArray
from dflash2.runtime.sampling import Rule
from dflash2.runtime.select import Chance, Draft
from dflash2.runtime.session import Session
from dflash2.runtime.turns import Turns

_LAST_ROW = -1


class Host(Protocol):
    """What a request moves along: the tokens a `Llama` object has processed, and their logits if it keeps them."""

    n_tokens: int
    input_ids: IntArray
    scores: FloatArray
    _logits_all: bool
    _session: Session
    _turns: Turns


class Request:
    """How one call of `generate` chooses tokens (`dflash2.runtime.accept.Request`); greedy without a rule.

    Attributes:
        greedy: whether every token is the argmax of its row.
        chance: how drafts are drawn; None for the argmax.
        fixes_depth: whether a seed was given whose text depends on the depth, which must then stay as it is.
    """

    def __init__(self, host: Any, rule: Rule | None, *, calls_user: bool = False) -> None:
        """`calls_user`: whether the rule runs the user's own logits processors."""
        self._host: Host = host
        self._rule = rule
        self._calls_user = calls_user
        self._row = _LAST_ROW
        self.greedy = rule is None
        self.chance: Chance | None = None if rule is None else rule.chance
        self.fixes_depth = rule is not None and rule.fixes_depth

    @property
    def position(self) -> int:
        """Tokens processed so far."""
        return int(self._host.n_tokens)

    def advance(self, token: int, row: int) -> None:
        """Note that `token` is processed, as row `row` of the target's last batch."""
        host = self._host
        self._row = row
        host.input_ids[host.n_tokens] = token
        if host._logits_all:
            host.scores[host.n_tokens] = self.logits()
        host.n_tokens += 1

    def evaluated(self, surplus: int = 0) -> None:
        """The next choice follows the last token of a prompt; `surplus` rejected rows stand behind its row."""
        self._row = _LAST_ROW - surplus

    def choose(self, draft: Draft | None = None) -> int:
        """The target's token after the row last advanced over. Raises SamplingError if none may be chosen."""
        if self._rule is None:
            return int(self.logits().argmax())
        if self._calls_user:
            return self._host._turns.call(self._rule.choose, self.logits(), self.position, draft)
        return self._rule.choose(self.logits(), self.position, draft)

    def logits(self) -> FloatArray:
        """The row that decides the next token, [vocabulary]."""
        row: FloatArray = self._host._session.target.logits()[self._row]
        return row
