"""Injection: what the drafter holds of the target's positions, and features that wait to be injected with others."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dflash2.errors import NativeError
from dflash2.native import Context
from dflash2.runtime.checkpoints import Checkpoint
from dflash2.runtime.inject import inject

# Rows per injection call, at most. The drafter reserves head logits for all of them, whatever it is asked for: so
# few that these take no more than so many bytes.
_MOST_ROWS = 64
_LOGITS_BYTES = 32 << 20


class Injection:
    """Keeps the drafter's memory up with the target's.

    What a cycle accepted is noted (`accepted`), its features are copied while the target still has them (`collect`),
    and injected before the drafter runs (`flush`).

    Attributes:
        reached: the drafter holds injected positions up to here.
    """

    def __init__(
        self, target: Context, drafter: Context, *, rows: int, width: int, cleared: Callable[[], None]
    ) -> None:
        """For at most `rows` features of `width` per call; `cleared` is called when the drafter's memory was lost."""
        self._target = target
        self._drafter = drafter
        self._cleared = cleared
        self._features = np.empty((rows, width), np.float32)
        self._held = 0  # rows of features to be injected behind the present ones
        self._accepted = (0, 0)
        self.reached = 0

    def accepted(self, n: int, position: int) -> None:
        """Note that the first `n` rows of the target's last batch, at `position`..., stay."""
        self._accepted = n, position

    def skip(self) -> None:
        """Forget what was noted: the target kept no features of it, or will not keep them."""
        self._accepted = (0, 0)

    def drop(self) -> None:
        """Forget all that waits."""
        self.skip()
        self._held = 0

    def collect(self) -> None:
        """Take the features of what was noted, before the target's next batch overwrites them."""
        (n, position), self._accepted = self._accepted, (0, 0)
        if n and position != self.reached + self._held:
            self.restart(position)
        first = 0
        while n:
            if self._held == len(self._features):
                self.flush()
            part = self._features[self._held : self._held + n]
            self._target.layer_inputs(first, part)
            first, n, self._held = first + len(part), n - len(part), self._held + len(part)

    def flush(self) -> None:
        """Inject all that was collected."""
        if self._held:
            # Given up first: if an interrupt comes in between, positions no longer follow, and the drafter starts anew.
            held, self._held = self._held, 0
            self._drafter.decode_features(self._features[:held], self.reached)
            self.reached += held

    def batch(self, first: int, n: int, position: int) -> None:
        """Inject rows `first`..`first + n` of the target's last batch; row `first` stands at `position`."""
        inject(self._target, self._drafter, self._features, first=first, n=n, position=position)
        self.reached = position + n

    def begin(self, position: int) -> None:
        """Be ready for features of `position`: positions must follow each other unless the memory is empty."""
        if position != self.reached:
            self.restart(position)

    def restart(self, position: int) -> None:
        """Empty the drafter's memory, to go on at `position`."""
        self._drafter.clear()
        self._cleared()
        self._held = 0
        self.reached = position

    def cut(self, length: int, checkpoint: Checkpoint | None = None) -> None:
        """Keep at most `length` positions, with the help of `checkpoint` if the window before them was lost."""
        self.reached = min(self.reached, length)
        if checkpoint is not None and checkpoint.drafter is not None and not self._drafter.reaches(self.reached):
            self._drafter.restore_part(checkpoint.drafter, checkpoint.length)
        if not self._drafter.truncate(self.reached):
            raise NativeError(f"the drafter's memory cannot be cut to {self.reached} positions.")

    def forget(self) -> None:
        """Empty the drafter's memory, checkpoints of it included; nothing waits any more."""
        self.drop()
        self._drafter.clear()
        self.reached = 0


def drafter_rows(block_size: int, n_vocab: int) -> int:
    """Rows per batch of the drafter: its block at least, and so few that their logits take little memory."""
    return max(block_size, min(_MOST_ROWS, _LOGITS_BYTES // (4 * n_vocab)))
