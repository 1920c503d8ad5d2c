"""Planning: whether the next cycle drafts, and how much; what a cycle teaches."""

from __future__ import annotations

from typing import Literal

from dflash2.errors import Dflash2Error
from dflash2.native import Context, library
from dflash2.runtime.depth import PLAIN, DepthController, Step, Times
from dflash2.runtime.pair import DrafterSpec
from dflash2.runtime.watchdog import Watchdog, warn

Depth = int | Literal["auto"]


class Planner:
    """Plans cycles: at a fixed depth, or at one that a controller finds; the watchdog may end all drafting.

    Attributes:
        auto_disable: whether the watchdog may.
        draft_block: rows of a draft pass at a fixed depth, or more if the depth needs more.
    """

    def __init__(self, target: Context, spec: DrafterSpec, *, auto_disable: bool, quantised_cache: bool) -> None:
        """Depth 0; `quantised_cache` is what the watchdog names if next to no draft is accepted."""
        self._target = target
        self._spec = spec
        self._quantised_cache = quantised_cache
        self.auto_disable = auto_disable
        self.draft_block = spec.block_size
        self._pinned = self._suspended = self._coasting = False
        self._coast = self._coasted = 0  # plain tokens to come, and gone by, that are not planned
        self.depth = 0

    @property
    def drafting(self) -> bool:
        """Whether drafts may come, though perhaps not with the next token."""
        return self._depth != 0 and not self._suspended

    @property
    def injecting(self) -> bool:
        """Whether the drafter is to have what the target processes now."""
        return self.drafting and (self._controller is None or self._pinned or self._controller.ready)

    @property
    def depth(self) -> Depth:
        """Draft tokens verified per cycle, 0 for none; setting it also ends a suspension by the watchdog."""
        return self._depth

    @depth.setter
    def depth(self, depth: Depth) -> None:
        most = self._most_depth if depth == "auto" else depth
        if type(most) is not int or not 0 <= most < self._spec.block_size:
            raise Dflash2Error(
                f'depth must be "auto" or a whole number in 0..{self._spec.block_size - 1} for this drafter, '
                f"got {depth!r}."
            )
        if most >= self._target.n_batch:
            raise Dflash2Error(
                f"depth {depth} needs n_batch of at least {most + 1}, this target has {self._target.n_batch}; "
                "raise n_batch or lower depth."
            )
        snapshots = self._target.snapshots
        if snapshots and most > snapshots:
            raise Dflash2Error(
                f"depth {depth} needs a target that can step back {depth} tokens; this one's recurrent state keeps "
                f"{snapshots} snapshots. Make the object with this depth."
            )
        self._controller: DepthController | None = None
        self._depth: Depth = most
        if depth == "auto" and most > 0:
            self._controller = DepthController(most, self._spec.block_size, self._spec.window)
            self._depth = depth
        self._suspended = False
        self.pin(False)
        self._watchdog = Watchdog(
            judge_speed=self._controller is None,
            quantised_cache=self._quantised_cache,
            mixed_causality=self._spec.mixed_causality and not library().patched,
        )

    @property
    def _most_depth(self) -> int:
        """The largest depth that block, batch and snapshots allow."""
        most = min(self._spec.block_size, self._target.n_batch) - 1
        return min(most, self._target.snapshots) if self._target.snapshots else most

    def pin(self, pinned: bool) -> None:
        """Note whether the request to come promises its tokens only if the depth is always the same."""
        self._pinned = pinned
        self._coast = self._coasted = 0

    def offer_prompt(self, tokens: int) -> None:
        """Note that `tokens` of a prompt come: a drafter that was let go may start anew with them."""
        if self._controller is not None and self._controller.offer_prompt():
            self._controller.saw_prompt(tokens)

    def plan(self) -> Step:
        """The next cycle."""
        return PLAIN if self.coasts() else self._choose()

    def coasts(self) -> bool:
        """Whether the next token is plain, without a choice."""
        if self._coast:
            self._coast -= 1
            self._coasting = True
            return True
        self._coasting = False
        return not self.drafting

    def _choose(self) -> Step:
        if self._controller is None:
            assert isinstance(self._depth, int)
            plain = self._watchdog.wants_plain and self.auto_disable and not self._pinned
            return PLAIN if plain else Step(self._depth, max(self.draft_block, self._depth + 1))
        if self._pinned or (self._watchdog.doubtful and self._controller.ready):
            return self._controller.most()
        return self._controller.plan()

    def learn(self, depth: int, accepted: int, times: Times) -> None:
        """Learn from a cycle that verified `depth` drafts, of which `accepted` held."""
        if self._coasting:
            return
        if self._controller is not None and not self._pinned:
            self._controller.observe(depth, accepted, times, self._coasted)
            self._coast = self._coasted = self._controller.coast()
        if not self.drafting:
            return
        watch = self._watchdog
        reason = watch.observe(accepted, times.total) if depth else watch.observe_plain(times.total)
        if reason is not None and self.auto_disable:
            self._suspended = True
            warn(reason)
