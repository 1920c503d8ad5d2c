"""Watchdog: notices drafts that do not help, and says why that may be."""

from __future__ import annotations

import warnings
from statistics import median

CYCLES = 32  # before a verdict on acceptance, and before the first one on speed
_LEAST_ACCEPTED = 0.1  # tokens per cycle, below which a drafter does not help
_LEAST_SPEED = 0.9  # of plain tokens, below which a fixed depth is slower beyond doubt
_PLAIN_TOKENS = 5  # per comparison; the first two are not counted, their graph is new
_UNCOUNTED = 2
_WRONG_PAIR = (
    "the drafter belongs to another target (or another fine-tune of it); the checkpoint was converted with the wrong "
    "taps or mask token"
)
_MIXED = (
    "its layers mix causal and non-causal attention (dflash.attention.causal_swa), which a stock llama.cpp runs as one "
    "kind"
)
_QUANTISED = "its KV cache is quantised (type_k_draft, type_v_draft)"
_SLOW = (
    "a target so small, or a processor so slow at several rows, that verifying them costs more than it saves; a "
    'drafter on a slower device than its target; too large a depth (depth="auto" finds the best)'
)


class Watchdog:
    """Sums up the cycles of one setting of the depth: acceptance every so many, speed ever more rarely.

    Plain tokens are asked for in between to compare with, if speed is to be judged.
    """

    def __init__(self, *, judge_speed: bool, quantised_cache: bool = False, mixed_causality: bool = False) -> None:
        """`quantised_cache`, `mixed_causality`: causes to name for the lack of acceptance besides a wrong pair."""
        self._causes = "; ".join([_WRONG_PAIR, *[_QUANTISED] * quantised_cache, *[_MIXED] * mixed_causality])
        self._judge_speed = judge_speed
        self._cycles = self._accepted = 0
        self._until = CYCLES
        self._forget()

    def _forget(self) -> None:
        self._tokens = 0
        self._seconds: list[float] = []
        self._plain: list[float] = []

    @property
    def doubtful(self) -> bool:
        """Whether next to nothing was accepted so far, in too few cycles for a verdict."""
        return self._cycles > 0 and self._accepted < _LEAST_ACCEPTED * self._cycles

    @property
    def wants_plain(self) -> bool:
        """Whether the next token should come without drafts, to compare with."""
        return self._judge_speed and len(self._seconds) >= self._until

    def observe(self, accepted: int, seconds: float) -> str | None:
        """Count a cycle that drafted; why drafting should end, if so."""
        self._cycles += 1
        self._accepted += accepted
        if self._judge_speed:
            self._tokens += accepted + 1
            self._seconds.append(seconds)
        if self._cycles < CYCLES:
            return None
        cycles, total = self._cycles, self._accepted
        self._cycles = self._accepted = 0
        if total < _LEAST_ACCEPTED * cycles:
            return f"{total} draft tokens were accepted in {cycles} cycles. Likely causes: {self._causes}"
        return None

    def observe_plain(self, seconds: float) -> str | None:
        """Count a token that `wants_plain` asked for; why drafting should end, if so."""
        if not self.wants_plain:
            return None
        self._plain.append(seconds)
        if len(self._plain) < _PLAIN_TOKENS:
            return None
        plain, cycle = median(self._plain[_UNCOUNTED:]), median(self._seconds)
        per_cycle = self._tokens / len(self._seconds)
        self._until *= 2
        self._forget()
        if per_cycle * plain < _LEAST_SPEED * cycle:
            return (
                f"a cycle takes {1e3 * cycle:.2f} ms for {per_cycle:.1f} tokens, one token without drafting "
                f"{1e3 * plain:.2f} ms. Likely causes: {_SLOW}"
            )
        return None


def warn(reason: str) -> None:
    """Say that drafting ends for this `reason`."""
    warnings.warn(
        f"drafting is switched off: {reason}. Set depth again to retry; auto_disable=False keeps drafting on.",
        RuntimeWarning,
        stacklevel=2,
    )
