"""Checkpoints: parts of both memories, kept so that a request whose history diverges need not begin at zero."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from dflash2.errors import Dflash2Error
from dflash2.native import Bytes


@dataclass(frozen=True)
class CheckpointLimits:
    """What checkpoints may cost.

    Attributes:
        count: most checkpoints kept, 0 for none.
        step: least distance between two of them, in tokens; the one near a prompt's end is taken in any case.
        bytes: most memory of all of them together.
    """

    count: int = 8
    step: int = 2048
    bytes: int = 2 << 30

    def __post_init__(self) -> None:
        if self.count < 0 or self.step < 1 or self.bytes < 0:
            raise Dflash2Error("checkpoints need a count of at least 0, a step of at least 1 token and bytes >= 0.")


@dataclass(frozen=True)
class Checkpoint:
    """What the memories cannot bring back by themselves, at `length` positions; None where there is no such part.

    `drafter` is None too where the drafter held less than its window then.
    """

    length: int
    target: Bytes | None
    drafter: Bytes | None

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(part.nbytes for part in (self.target, self.drafter) if part is not None)


class Checkpoints:
    """The checkpoints of one session, by rising length, within their limits."""

    def __init__(self, limits: CheckpointLimits) -> None:
        self.limits = limits
        self._kept: list[Checkpoint] = []

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def nbytes(self) -> int:
        """Bytes held by all."""
        return sum(checkpoint.nbytes for checkpoint in self._kept)

    @property
    def last(self) -> int:
        """Length of the longest, 0 if there is none."""
        return self._kept[-1].length if self._kept else 0

    def add(self, checkpoint: Checkpoint) -> None:
        """Keep `checkpoint`, longer than those before; the closest two make room if need be."""
        if not self.limits.count or checkpoint.nbytes > self.limits.bytes:
            return
        self.drop_beyond(checkpoint.length - 1)
        self._kept.append(checkpoint)
        while len(self._kept) > self.limits.count or self.nbytes > self.limits.bytes:
            del self._kept[self._most_crowded()]

    def _most_crowded(self) -> int:
        """Index of the one nearest to its predecessor (the first one's is 0), the newest spared."""
        lengths = [0, *(checkpoint.length for checkpoint in self._kept)]
        gaps = [after - before for before, after in pairwise(lengths)]
        return min(range(max(1, len(gaps) - 1)), key=gaps.__getitem__)

    def nearest(self, length: int) -> Checkpoint | None:
        """The longest one of at most `length` positions."""
        return next((checkpoint for checkpoint in reversed(self._kept) if checkpoint.length <= length), None)

    def drop_beyond(self, length: int) -> None:
        """Forget those of more than `length` positions: other tokens will stand there."""
        while self._kept and self.last > length:
            self._kept.pop()

    def drop_drafter(self) -> None:
        """Forget the drafter's parts: what they complete is gone."""
        self._kept = [Checkpoint(one.length, one.target, None) for one in self._kept]
