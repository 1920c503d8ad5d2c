"""How many draft tokens to verify: chosen while generating, for the most tokens per second.

Every cycle tells what it cost and how many drafts held. Expected tokens of a cycle follow from how often the draft of
each position holds, given that those before it did; tokens per second from that and the cost of a cycle at each depth.
Depth 0 is a plain token. Nothing here knows llama.cpp or a clock: times come with the cycles.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

# Few widths, so that llama.cpp finds the graph of the cycle before again.
_LADDER = (1, 2, 3, 5, 7, 11, 15, 23, 31)
_HYSTERESIS = 0.02  # how much faster another depth must promise to be
_PROBE_SHARE = 0.01  # of all time, spent on looking whether other depths have become better
_PROBE_CYCLES = 4  # per look; the first one is not timed, its graph is new
# Tokens between two decisions, at least, and between two plain tokens looked at; no divisor of how many are injected
# together.
_STRIDE = 7
_REST = 31  # the same while plain tokens are fastest and nothing is looked at
_PROBE_TOKENS = 64  # between two looks, at least
_WARM_TOKENS = 256  # injected again before drafts are tried, when injection was given up; or the drafter's window
_KEEP_SHARE = 0.01  # of a plain token's time: what keeping the drafter ready may cost while nothing is drafted
_UNTRIED = 0.9  # guesses of what was never measured are a little too low, so that it is tried where it may pay
_BLOCK_LOSS = 0.02  # of the accepted length, by a shortened draft block (measured on the demo pair)
_FEW = 3  # timed cycles that make a cost known
# What a cycle's cost counts: for its own depth, and for all of them, since a busy machine and a long context slow all.
_OWN, _ALL = 0.06, 0.15
_CLIP = 2.0  # one cycle counts as this many times the usual cost at most, or that part of it at least
_RECENT, _PAST = 256.0, 1024.0  # tokens after which an observation of acceptance counts half
_PRIOR, _PRIOR_WEIGHT = 0.6, 4.0
_RECENT_WEIGHT = 6.0
# More looks at the largest depth in the beginning, which tells of all positions, unless that is hopeless.
_FIRST_LOOKS, _HOPEFUL = 3, 0.8


class Step(NamedTuple):
    """One cycle to come: draft tokens to verify, and rows of the draft pass, the anchor's included."""

    depth: int
    block: int


class Times(NamedTuple):
    """Seconds of one cycle: all of it (the caller's own time left out), and of these stages."""

    total: float
    inject: float
    draft: float
    verify: float


PLAIN = Step(0, 0)


class Rates:
    """How often the draft of each position holds where all before it did, lately; fewer counts lean on older ones."""

    def __init__(self, positions: int) -> None:
        self._counts = [[[0.0, 0.0] for _ in range(positions)] for _ in (_RECENT, _PAST)]
        self._passed = 0

    def pass_by(self, tokens: int) -> None:
        """Let the evidence age by `tokens`."""
        self._passed += tokens

    def _age(self) -> None:
        passed, self._passed = self._passed, 0
        for half_life, counts in zip((_RECENT, _PAST), self._counts, strict=True):
            factor = 0.5 ** (passed / half_life)
            for count in counts:
                count[0] *= factor
                count[1] *= factor

    def observe(self, depth: int, accepted: int) -> None:
        """Count a cycle that verified `depth` drafts, of which the first `accepted` held."""
        self.pass_by(accepted + 1)
        self._age()
        for counts in self._counts:
            for position in range(min(depth, accepted + 1)):
                counts[position][0] += 1.0
                counts[position][1] += position < accepted

    def expected(self) -> list[float]:
        """Tokens per cycle at depth 0, 1, ...: 1 + h1 + h1 h2 + ..."""
        self._age()
        tokens, path, before = [1.0], 1.0, _PRIOR
        for recent, past in zip(*self._counts, strict=True):
            before = (past[1] + _PRIOR_WEIGHT * before) / (past[0] + _PRIOR_WEIGHT)
            path *= (recent[1] + _RECENT_WEIGHT * before) / (recent[0] + _RECENT_WEIGHT)
            tokens.append(tokens[-1] + path)
        return tokens


@dataclass
class _Cost:
    """Time of a cycle at one depth, and of its parts: geometric means, which single slow cycles hardly move."""

    first: list[Times] = field(default_factory=list)
    total: float = 0.0
    draft: float = 0.0
    verify: float = 0.0

    @property
    def known(self) -> bool:
        return len(self.first) >= _FEW

    def begin(self, times: Times, scale: float) -> None:
        self.first.append(times)
        _, _, self.draft, self.verify = (median(part) / scale for part in zip(*self.first, strict=True))
        self.total = median(each.total for each in self.first) / scale

    def follow(self, factor: float) -> None:
        self.total *= factor
        self.draft *= factor
        self.verify *= factor


class DepthController:
    """Chooses a `Step` before each cycle (`plan`) and learns from it (`observe`).

    A depth is left for another only if that promises more by a margin. Now and then another one is tried; the time this
    loses is bounded by a share of all time. While plain tokens are fastest, the drafter is kept ready by injecting what
    is generated, unless that costs more than a share of it too; then it starts anew before it is tried again.

    Attributes:
        ready: whether the drafter is to have what is generated now.
    """

    def __init__(self, most: int, block: int, window: int | None = None) -> None:
        """For depths up to `most`, a drafter of `block` rows whose layers look back `window` (None: all) positions."""
        self._block = block
        self._depths = (0, *ladder(most))
        self._costs = {depth: _Cost() for depth in self._depths}
        self._rows = dict.fromkeys(self._depths[1:-1])  # rows of a draft pass, once decided
        self._rates = Rates(block - 1)
        self._base = self._last = self._depths[-1]
        # The beginning is a look at the two ends.
        self._queue = deque([0] * (_FEW + 1) + [self._depths[-1]] * _PROBE_CYCLES)
        self._scale = 1.0  # seconds per unit of the costs: what slows all depths alike
        self._look = (0.0, 0)  # time and tokens of the present look
        self._debt = 0.0  # time lost by looking around, not yet made up for
        self._since = 0  # tokens since then
        self._settled = False  # whether the present base lasted
        self._woken = False  # whether the drafter starts anew for a look that is due
        self._undecided = _STRIDE  # tokens since the last decision
        self._turn = 0
        self._first_looks = _FIRST_LOOKS
        self._keeping = 0.0  # share of a plain token's time that `ready` takes
        self._warm = min(window or _WARM_TOKENS, _WARM_TOKENS)
        self._cold = 0  # tokens to be injected before drafts can be tried
        self.ready = True

    @property
    def fastest(self) -> int:
        """The depth believed to be fastest, 0 for plain tokens."""
        return self._base

    def speed(self, depth: int) -> float:
        """Expected tokens per second at a `depth` of the ladder."""
        return self._speeds()[depth] / self._scale

    def plan(self) -> Step:
        """The next cycle."""
        if not self._queue and self._undecided >= _STRIDE:
            self._decide()
            self._undecided = 0
        return self._step(self._queue[0] if self._queue else self._base)

    def most(self) -> Step:
        """The deepest step there is, which depends on nothing seen."""
        return self._step(self._depths[-1])

    def _step(self, depth: int) -> Step:
        if depth == 0:
            return PLAIN
        return Step(depth, self._block if depth == self._depths[-1] else self._rows[depth] or depth + 1)

    def coast(self) -> int:
        """Plain tokens to come that need no plan and are not observed: nothing is waited for."""
        resting = self._base == 0 and not self._queue and self._cold == 0 and self._last == 0
        return _REST - 1 if resting else 0

    def observe(self, depth: int, accepted: int, times: Times, coasted: int = 0) -> None:
        """Learn from a cycle that verified `depth` drafts, of which `accepted` held, after `coasted` plain tokens."""
        looking = bool(self._queue) and self._queue[0] == depth
        if looking:
            self._queue.popleft()
        if coasted and depth:
            self._rates.pass_by(coasted)
            self._account(0, coasted, coasted * self._costs[0].total * self._scale)
            coasted = 0
        tokens = accepted + 1 + coasted
        self._undecided = self._undecided + tokens if self._queue or not looking else _STRIDE
        if depth not in self._costs:  # cut short by the end of the context
            return
        if depth:
            self._rates.observe(depth, accepted)
        else:
            self._rates.pass_by(tokens)
            times = self._without_keeping(times, tokens)
        if depth == self._last:
            self._learn_cost(depth, times)
        self._last = depth
        self._account(depth, tokens, times.total * (1 if depth else tokens))

    def saw_prompt(self, tokens: int) -> None:
        """Note that `tokens` of a prompt were injected."""
        self._cold = max(0, self._cold - tokens)

    def offer_prompt(self) -> bool:
        """Whether a prompt to come should be injected."""
        if not self.ready and self._may_look():
            self._wake()
        return self.ready

    def _without_keeping(self, times: Times, tokens: int) -> Times:
        """A plain token's time as it would be without keeping the drafter ready, whose cost is noted."""
        if self.ready:
            self._keeping += _OWN * (times.inject / times.total - self._keeping)
            self._cold = max(0, self._cold - tokens)
            if self._base == 0 and self._keeping > _KEEP_SHARE:
                self._look = (self._look[0] + tokens * times.inject / self._scale, self._look[1])
        return Times(times.total - times.inject, 0.0, 0.0, times.verify)

    def _learn_cost(self, depth: int, times: Times) -> None:
        cost = self._costs[depth]
        if cost.known:
            ratio = min(max(times.total / (self._scale * cost.total), 1 / _CLIP), _CLIP)
            self._scale *= ratio**_ALL
            cost.follow(ratio**_OWN)
            return
        cost.begin(times, self._scale)
        if cost.known and self._rows.get(depth, 0) is None:
            self._choose_rows(depth)

    def _choose_rows(self, depth: int) -> None:
        """Draft a whole block if a shortened one saves less time than it loses tokens."""
        cost, full = self._costs[depth], self._costs[self._depths[-1]]
        saved = full.draft - cost.draft
        if saved < _BLOCK_LOSS * cost.total:
            self._rows[depth] = self._block
            cost.total += saved
            cost.draft = full.draft
        else:
            self._rows[depth] = depth + 1

    def _account(self, depth: int, tokens: int, seconds: float) -> None:
        seconds /= self._scale
        usual = self._costs[depth].total
        if usual:
            seconds = min(seconds, _CLIP * usual * (1 if depth else tokens))
        if depth != self._base:
            self._look = (self._look[0] + seconds, self._look[1] + tokens)
            self._since = 0
        else:
            self._debt = max(0.0, self._debt - _PROBE_SHARE * seconds)
            self._since += tokens

    def _settle(self, speeds: dict[int, float]) -> None:
        """Note what the last look lost."""
        (seconds, tokens), self._look = self._look, (0.0, 0)
        self._debt += max(0.0, seconds - tokens / speeds[self._base])

    def _may_look(self) -> bool:
        return self._woken or (self._debt <= 0.0 and self._since >= _PROBE_TOKENS)

    def _speeds(self) -> dict[int, float]:
        tokens = self._rates.expected()
        return {depth: tokens[depth] / cost for depth, cost in self._guesses().items()}

    def _guesses(self) -> dict[int, float]:
        """Seconds of a cycle at each depth, measured or guessed."""
        plain, full = self._costs[0], self._costs[self._depths[-1]]
        guesses = {}
        for depth, cost in self._costs.items():
            if cost.known or depth in (0, self._depths[-1]):
                guesses[depth] = cost.total or 1.0
                continue
            share = depth / self._depths[-1]
            verify = plain.verify + share * (full.verify - plain.verify)
            rest = (full.total - full.verify) * (0.5 + 0.5 * share)
            guesses[depth] = _UNTRIED * (verify + rest)
        return guesses

    def _decide(self) -> None:
        """Change the depth, or look at another one, if there is reason to."""
        speeds = self._speeds()
        best = max(speeds, key=speeds.__getitem__)
        if self._first_looks and speeds[self._depths[-1]] > _HOPEFUL * speeds[0]:
            self._first_looks -= 1
            self._queue.extend([self._depths[-1]] * _PROBE_CYCLES)
            return
        self._first_looks = 0
        promising = speeds[best] > (1 + _HYSTERESIS) * speeds[self._base]
        if promising and self._costs[best].known and (best == 0 or self._drafts_can_be_tried()):
            self._base = best
            self._settled = False
        if self._cold == 0:
            self._settle(speeds)
        look = best if promising else self._other(speeds) if self._may_look() else self._base
        if look == self._base:
            self._settled = self._settled or self._since >= _PROBE_TOKENS
            if look == 0 and self._settled and self._keeping > _KEEP_SHARE:
                self.ready = False
        elif look == 0 or self._drafts_can_be_tried():  # in vain for a known depth while the drafter starts anew
            self._woken = False
            self._queue.extend([look] * _PROBE_CYCLES)

    def _drafts_can_be_tried(self) -> bool:
        self._wake()
        return self._cold == 0

    def _wake(self) -> None:
        if not self.ready:
            self.ready = self._woken = True
            self._cold = self._warm

    def _other(self, speeds: dict[int, float]) -> int:
        """What to look at: the best of the drafts while there are none, else the neighbours and no drafts in turn."""
        if self._base == 0:
            return max(self._depths[1:], key=speeds.__getitem__)
        at = self._depths.index(self._base)
        others = [self._depths[i] for i in (at - 1, at + 1) if 0 <= i < len(self._depths)]
        others += [0] * (0 not in others)
        self._turn += 1
        return others[self._turn % len(others)]


def ladder(most: int) -> Sequence[int]:
    """The depths to choose from, up to `most`."""
    return (*(depth for depth in _LADDER if depth < most), most)
