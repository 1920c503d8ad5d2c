"""When drafting is given up, and what is said then."""

from itertools import pairwise

import pytest

from dflash2.runtime.watchdog import CYCLES, Watchdog


def run(watchdog, cycles, accepted, seconds=1.0, plain=None):
    """Reasons given over so many cycles, plain tokens interposed when asked for."""
    reasons = []
    for cycle in range(cycles):
        reasons.append(watchdog.observe(accepted[cycle % len(accepted)], seconds))
        while watchdog.wants_plain:
            reasons.append(watchdog.observe_plain(plain))
    return [reason for reason in reasons if reason]


def test_nothing_accepted_is_a_reason_after_so_many_cycles():
    watchdog = Watchdog(judge_speed=False)
    assert run(watchdog, CYCLES - 1, [0]) == []
    assert watchdog.doubtful
    (reason,) = run(watchdog, 1, [0])
    assert "0 draft tokens were accepted in 32 cycles" in reason
    assert "another target" in reason


def test_one_accepted_token_in_eight_cycles_is_none():
    watchdog = Watchdog(judge_speed=False)
    assert run(watchdog, 3 * CYCLES, [1, *[0] * 7]) == []
    assert not watchdog.doubtful


@pytest.mark.parametrize(
    ("causes", "said"), [({"quantised_cache": True}, "quantised"), ({"mixed_causality": True}, "causal_swa")]
)
def test_only_causes_that_the_pair_has_are_named(causes, said):
    (reason,) = run(Watchdog(judge_speed=False, **causes), CYCLES, [0])
    assert said in reason
    (reason,) = run(Watchdog(judge_speed=False), CYCLES, [0])
    assert said not in reason


def test_drafting_slower_than_plain_tokens_is_a_reason():
    (reason,) = run(Watchdog(judge_speed=True), CYCLES, [1], seconds=1.0, plain=0.4)
    assert "2.0 tokens" in reason
    assert "1000.00 ms" in reason
    assert "400.00 ms" in reason


def test_drafting_faster_than_plain_tokens_is_none():
    watchdog = Watchdog(judge_speed=True)
    assert run(watchdog, 20 * CYCLES, [1], seconds=1.0, plain=0.6) == []


def test_plain_tokens_are_asked_for_ever_more_rarely():
    watchdog = Watchdog(judge_speed=True)
    asked = []
    for cycle in range(32 * CYCLES):
        watchdog.observe(3, 1.0)
        if watchdog.wants_plain:
            asked.append(cycle + 1)
        while watchdog.wants_plain:
            watchdog.observe_plain(1.0)
    assert [b - a for a, b in pairwise([0, *asked])] == [CYCLES * 2**i for i in range(len(asked))]
    assert len(asked) == 5


def test_speed_is_not_judged_unless_asked_for():
    watchdog = Watchdog(judge_speed=False)
    assert run(watchdog, 10 * CYCLES, [3], seconds=100.0) == []
    assert not watchdog.wants_plain
