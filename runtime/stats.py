"""What drafting did, counted while it runs and handed out as frozen snapshots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter
from types import MappingProxyType

import numpy as np

from dflash2.native import IntArray
from dflash2.runtime.depth import Times

STAGES = ("inject", "draft", "select", "verify", "accept", "rollback", "host")


@dataclass(frozen=True)
class DraftStats:
    """Counts since the object was made or `reset_stats` was called.

    Attributes:
        cycles: verify passes that carried drafts' block.
        drafted: draft tokens verified.
        accepted: draft tokens that equalled the target's own, whether or not the caller took them.
        emitted: tokens handed to the caller, those made without drafting included.
        accepted_at: `accepted_at[i]` cycles accepted the draft token of block row i + 1.
        drafted_at: `drafted_at[i]` cycles verified one there.
        at_depth: `at_depth[d]` cycles verified d draft tokens; `at_depth[0]` tokens came without drafts.
        reached_at: `reached_at[i]` cycles verified the draft token of block row i + 1 and accepted all before it.
        seconds: wall time per stage; `host` is the caller's time between tokens, and choosing the depth.
        prompt_tokens: tokens evaluated outside cycles, prefixes taken from the cache excluded.
        prompt_seconds: wall time of that, injection included.
    """

    cycles: int
    drafted: int
    accepted: int
    emitted: int
    accepted_at: tuple[int, ...]
    drafted_at: tuple[int, ...]
    seconds: Mapping[str, float]
    prompt_tokens: int
    prompt_seconds: float
    at_depth: tuple[int, ...] = ()
    reached_at: tuple[int, ...] = ()

    @property
    def accepted_length(self) -> float:
        """L: tokens per verify pass, the target's own token included; 0 before the first cycle."""
        return (self.accepted + self.cycles) / self.cycles if self.cycles else 0.0

    @property
    def acceptance(self) -> float:
        """Share of the verified draft tokens that were accepted, 0..1."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def acceptance_at(self) -> tuple[float, ...]:
        """Share of cycles that accepted the draft token of block row i + 1, of those that verified one there."""
        return tuple(a / d if d else 0.0 for a, d in zip(self.accepted_at, self.drafted_at, strict=True))


@dataclass(frozen=True)
class CycleRecord:
    """One cycle: `proposal` follows `anchor`, which stands at `position`; its first `accepted` tokens held."""

    position: int
    anchor: int
    proposal: tuple[int, ...]
    accepted: int


class Recorder:
    """The running counts behind `DraftStats`; `lap` splits the time of a cycle among the stages.

    Attributes:
        clock: seconds that count.
    """

    def __init__(self, block_size: int, clock: Callable[[], float] = perf_counter) -> None:
        self._block_size = block_size
        self.clock = clock
        self.reset()

    def reset(self) -> None:
        """Start counting from zero."""
        self.emitted = self.prompt_tokens = 0
        self.prompt_seconds = 0.0
        self._counts: Counter[tuple[int, int]] = Counter()  # cycles by drafts verified, and of these accepted
        self._seconds = dict.fromkeys(STAGES, 0.0)
        self._busy = 0.0  # of all stages but `host`
        self._before = self._times()
        self._last = self.clock()

    def start(self) -> None:
        """Forget the time since the last lap."""
        self._last = self.clock()

    def lap(self, stage: str) -> None:
        """Charge the time since the last lap to `stage`."""
        now = self.clock()
        self._seconds[stage] += now - self._last
        if stage != "host":
            self._busy += now - self._last
        self._last = now

    def cycle(self, drafted: int, accepted: int) -> Times:
        """Count one cycle that verified `drafted` tokens and accepted the first `accepted` of them; what it took."""
        self._counts[drafted, accepted] += 1
        (a, b, c, d), (e, f, g, h) = now, _ = self._times(), self._before
        self._before = now
        return Times(a - e, b - f, c - g, d - h)

    def _times(self) -> tuple[float, float, float, float]:
        seconds = self._seconds
        return self._busy, seconds["inject"], seconds["draft"], seconds["verify"]

    def snapshot(self) -> DraftStats:
        """The counts as they are now."""
        drafted_at = np.zeros(self._block_size - 1, np.int64)
        accepted_at = np.zeros(self._block_size - 1, np.int64)
        at_depth = np.zeros(self._block_size, np.int64)
        reached_at = np.zeros(self._block_size - 1, np.int64)
        for (drafted, accepted), cycles in list(self._counts.items()):  # at once: another thread may be counting
            drafted_at[:drafted] += cycles
            accepted_at[:accepted] += cycles
            reached_at[: min(drafted, accepted + 1)] += cycles
            at_depth[drafted] += cycles
        return DraftStats(
            cycles=int(at_depth[1:].sum()),
            drafted=int(drafted_at.sum()),
            accepted=int(accepted_at.sum()),
            emitted=self.emitted,
            accepted_at=tuple(accepted_at.tolist()),
            drafted_at=tuple(drafted_at.tolist()),
            at_depth=tuple(at_depth.tolist()),
            reached_at=tuple(reached_at.tolist()),
            seconds=MappingProxyType(dict(self._seconds)),
            prompt_tokens=self.prompt_tokens,
            prompt_seconds=self.prompt_seconds,
        )


def record_of(position: int, block: IntArray, accepted: int) -> CycleRecord:
    """CycleRecord of a verified `block` [1 + drafts]: the anchor and the proposal."""
    anchor, *proposal = block.tolist()
    return CycleRecord(position, anchor, tuple(proposal), accepted)
