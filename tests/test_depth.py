"""The depth that is chosen while generating, on machines and drafters made of numbers."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash2.runtime.depth import PLAIN, DepthController, Rates, Times, ladder

BLOCK = 8
GOOD = (0.9, 0.85, 0.8, 0.8, 0.75, 0.7, 0.7)
POOR = (0.2, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1)


class Machine:
    """What a cycle takes: one row costs `row`, each more `more`; a draft pass `draft` and `draft_row` per row."""

    def __init__(self, row=1.0, more=0.05, draft=0.2, draft_row=0.0, keep=0.0, noise=0.0, seed=0):
        self.row, self.more, self.draft, self.draft_row, self.keep = row, more, draft, draft_row, keep
        self.noise, self.rng, self.slow = noise, np.random.default_rng(seed), 1.0

    def times(self, step, ready):
        verify = self.row + self.more * step.depth
        draft = self.draft + self.draft_row * step.block if step.depth else 0.0
        inject = 0.0 if step.depth else self.keep * ready
        scale = self.slow * float(np.exp(self.noise * self.rng.standard_normal()))
        return Times(*(scale * seconds for seconds in (verify + draft + inject, inject, draft, verify)))

    def speed(self, depth, rates):
        """Tokens per second at a fixed depth that drafts a whole block."""
        tokens = 1 + sum(np.cumprod(rates[:depth]))
        return tokens / (self.row + self.more * depth + (self.draft + self.draft_row * BLOCK if depth else 0))


class Run:
    """Generates with a controller; counts seconds, tokens and steps."""

    def __init__(self, controller, machine, seed=1):
        self.controller, self.machine, self.rng = controller, machine, np.random.default_rng(seed)
        self.coast = self.coasted = 0

    def tokens(self, n, rates):
        """Make `n` tokens; returns tokens per second. `steps` are those of this call."""
        made, seconds, self.steps, self.unready = 0, 0.0, [], 0
        while made < n:
            step = PLAIN if self.coast else self.controller.plan()
            ready = self.controller.ready
            self.unready += not ready
            assert ready or step.depth == 0
            accepted = 0
            while accepted < step.depth and self.rng.random() < rates[accepted]:
                accepted += 1
            times = self.machine.times(step, ready)
            seconds += times.total
            self.steps.append(step)
            made += accepted + 1
            if self.coast:
                self.coast -= 1
                continue
            self.controller.observe(step.depth, accepted, times, self.coasted)
            self.coast = self.coasted = self.controller.coast()
        return made / seconds

    @property
    def depths(self):
        return Counter(step.depth for step in self.steps)


def test_the_ladder_is_short_and_ends_at_the_largest_depth():
    assert ladder(7) == (1, 2, 3, 5, 7)
    assert ladder(6) == (1, 2, 3, 5, 6)
    assert ladder(15) == (1, 2, 3, 5, 7, 11, 15)
    assert ladder(1) == (1,)


def test_expected_tokens_are_a_sum_of_products_of_the_rates():
    rates = Rates(3)
    for _ in range(100):
        for accepted in (0, 1, 1, 2, 3, 3, 3, 3, 3, 3):
            rates.observe(3, accepted)
    assert rates.expected() == pytest.approx([1.0, 1.9, 2.6, 3.2], abs=0.1)


def test_positions_never_verified_are_guessed_from_those_before():
    rates = Rates(7)
    for _ in range(300):
        rates.observe(1, 1)
    assert rates.expected()[7] > 5


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    more=st.floats(0.0, 1.0),
    draft=st.floats(0.05, 1.5),
    draft_row=st.floats(0.0, 0.1),
    first=st.floats(0.2, 0.98),
    fall=st.floats(0.8, 1.0),
)
def test_nearly_as_fast_as_the_best_fixed_depth(more, draft, draft_row, first, fall):
    machine = Machine(more=more, draft=draft, draft_row=draft_row, noise=0.1)
    rates = [first * fall**i for i in range(BLOCK - 1)]
    run = Run(DepthController(BLOCK - 1, BLOCK), machine)
    run.tokens(1000, rates)
    speed = run.tokens(6000, rates)
    assert speed > 0.94 * max(machine.speed(depth, rates) for depth in range(BLOCK))


def test_a_drafter_that_does_not_pay_costs_next_to_nothing():
    machine = Machine(more=0.8, draft=2.0, keep=0.05)
    run = Run(DepthController(7, BLOCK, window=64), machine)
    run.tokens(500, GOOD)
    assert run.controller.fastest == 0
    assert run.tokens(10_000, GOOD) > 0.98 * machine.speed(0, GOOD)
    assert run.unready > 7500
    assert sum(count for depth, count in run.depths.items() if depth) >= 4  # it still looks, now and then


def test_the_drafter_is_kept_ready_where_that_is_cheap():
    run = Run(DepthController(7, BLOCK), Machine(more=0.8, draft=2.0, keep=0.001))
    run.tokens(5000, GOOD)
    assert run.controller.fastest == 0
    assert run.unready == 0


def test_drafts_are_tried_again_only_behind_a_window_injected_anew():
    machine = Machine(more=0.8, draft=2.0, keep=0.05)
    run = Run(DepthController(7, BLOCK, window=100), machine)
    run.tokens(2000, GOOD)
    for _ in range(20_000):
        before = run.controller.ready
        run.tokens(1, GOOD)
        if run.controller.ready and not before:
            break
    run.tokens(93, GOOD)
    assert set(run.depths) == {0}
    run.tokens(40, GOOD)
    assert set(run.depths) != {0}


def test_a_prompt_warms_the_drafter_up():
    controller = DepthController(7, BLOCK, window=100)
    run = Run(controller, Machine(more=0.8, draft=2.0, keep=0.05))
    run.tokens(800, GOOD)
    assert not controller.ready
    assert not controller.offer_prompt()  # it was tried a moment ago
    while not controller.offer_prompt():
        run.tokens(1, GOOD)
        assert run.depths[0] == len(run.steps)
    controller.saw_prompt(100)
    run.tokens(40, GOOD)
    assert set(run.depths) != {0}


def test_it_follows_the_acceptance():
    run = Run(DepthController(7, BLOCK), Machine(more=0.1, draft=0.3, noise=0.05))
    for rates, deepest, shallowest in ((GOOD, 7, 5), (POOR, 0, 0), (GOOD, 7, 5), (POOR, 0, 0)):
        run.tokens(3000, rates)
        assert shallowest <= run.controller.fastest <= deepest


def test_equal_depths_are_not_changed_to_and_fro():
    run = Run(DepthController(7, BLOCK), Machine(more=0.0, draft=0.0, noise=0.1), seed=3)
    run.tokens(2000, (0.5, *[0.02] * 6))  # every depth gives 1.5 tokens
    bases = []
    for _ in range(500):
        run.tokens(4, (0.5, *[0.02] * 6))
        bases.append(run.controller.fastest)
    assert 0 not in bases
    assert sum(a != b for a, b in pairwise(bases)) <= 12


def test_a_machine_that_becomes_slower_changes_nothing():
    rates = (0.9, 0.9, *[0.05] * 5)
    machine = Machine(more=0.1, draft=0.3)
    run = Run(DepthController(7, BLOCK), machine)
    run.tokens(2000, rates)
    machine.slow = 3.0
    run.tokens(2000, rates)
    assert run.depths[2] > 0.7 * len(run.steps)


def test_single_slow_cycles_change_little():
    rates = (0.9, 0.9, *[0.05] * 5)
    run = Run(DepthController(7, BLOCK), Machine(more=0.1, draft=0.3))
    run.tokens(2000, rates)
    depths = Counter()
    for _ in range(20):
        run.machine.slow = 50.0
        run.tokens(1, rates)
        run.machine.slow = 1.0
        run.tokens(100, rates)
        depths += run.depths
    assert depths[2] > 0.5 * sum(depths.values())


@pytest.mark.parametrize(("draft_row", "whole"), [(0.0, True), (0.05, False)])
def test_a_shortened_block_is_drafted_where_it_is_cheaper(draft_row, whole):
    rates = (0.9, 0.9, 0.3, 0.1, 0.1, 0.1, 0.1)
    run = Run(DepthController(7, BLOCK), Machine(more=0.2, draft=0.2, draft_row=draft_row))
    run.tokens(2000, rates)
    depth = run.controller.fastest
    assert depth in (2, 3)
    run.tokens(200, rates)
    blocks = {step.block for step in run.steps if step.depth == depth}
    assert blocks == {BLOCK if whole else depth + 1}


def test_a_depth_cut_by_the_end_of_the_context_is_not_learned_from():
    run = Run(DepthController(7, BLOCK), Machine())
    run.tokens(500, GOOD)
    before = {depth: run.controller.speed(depth) for depth in (0, 1, 7)}
    run.controller.observe(4, 4, Times(100.0, 0.0, 0.0, 100.0))
    assert {depth: run.controller.speed(depth) for depth in (0, 1, 7)} == before
