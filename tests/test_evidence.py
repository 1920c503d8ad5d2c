"""Benchmark: what they compare, what they count, what follows from the counts."""

import pytest

from dflash2 import DFlashLlama, DraftStats
from dflash2.evidence import Bench, PromptRuns, Run, bench

N_TOKENS = 40
OPTIONS = {"n_ctx": 512, "n_threads": 1, "n_threads_batch": 1}


def stats(cycles=0, accepted=0, depth=7):
    return DraftStats(
        cycles=cycles,
        drafted=cycles * depth,
        accepted=accepted,
        emitted=0,
        accepted_at=(),
        drafted_at=(),
        seconds={"draft": 0.008 * cycles, "verify": 0.012 * cycles},
        prompt_tokens=0,
        prompt_seconds=0.0,
    )


def runs(tokens, cycles, accepted, *, prompt=0, token_ms=10.0, cycle_ms=20.0):
    """Both runs of a prompt at a given price per token and per cycle."""
    plain = Run(tokens, (len(tokens) - 1) * token_ms / 1000, stats())
    drafted = Run(tokens, cycles * cycle_ms / 1000, stats(cycles, accepted))
    return PromptRuns(prompt, plain, drafted)


def test_accepted_length_over_cycle_cost_is_the_speedup():
    measured = Bench((runs(tuple(range(101)), cycles=40, accepted=80),))
    assert measured.accepted_length == 3.0
    assert measured.acceptance == pytest.approx(80 / 280)
    assert measured.cycle_cost == pytest.approx(2.0)
    assert measured.speedup == pytest.approx(1.5)
    assert measured.plain_tokens_per_second == pytest.approx(100)
    assert measured.drafted_tokens_per_second == pytest.approx(150)
    assert measured.stage_ms == pytest.approx({"draft": 8.0, "verify": 12.0})


def test_accepted_length_weighs_cycles_alike_and_times_take_the_median_prompt():
    measured = Bench(
        (
            runs(tuple(range(101)), cycles=10, accepted=60, prompt=0),
            runs(tuple(range(101)), cycles=30, accepted=60, prompt=1, cycle_ms=24.0),
            runs(tuple(range(101)), cycles=60, accepted=0, prompt=2, token_ms=50.0, cycle_ms=90.0),
        )
    )
    assert measured.accepted_length == 1 + 120 / 100
    assert measured.token_seconds == pytest.approx(0.010)
    assert measured.cycle_seconds == pytest.approx(0.024)


def test_a_continuation_that_loops_has_few_distinct_4_grams():
    measured = Bench((runs((1, 2) * 50, 10, 60, prompt=0), runs(tuple(range(100)), 10, 20, prompt=1)))
    assert [run.distinct for run in measured.runs] == [2 / 97, 1.0]
    kept = measured.without_loops()
    assert [run.prompt for run in kept.runs] == [1]
    assert kept.accepted_length == 3.0


def test_bench_measures_the_tokens_it_was_asked_for(target_path, drafter_gguf, prompts):
    measured = bench(target_path, drafter_gguf, prompts[:2], n_tokens=N_TOKENS, **OPTIONS)
    llm = DFlashLlama(target_path, drafter_gguf, depth=None, auto_disable=False, verbose=False, **OPTIONS)
    assert [run.prompt for run in measured.runs] == [0, 1]
    for run, text in zip(measured.runs, prompts, strict=False):
        llm.reset()
        stream = llm.generate(llm.tokenize(text.encode()), temp=0.0)
        assert list(run.drafted.tokens) == [next(stream) for _ in range(N_TOKENS)]
        stream.close()
        assert run.equal
        assert run.plain.stats.cycles == 0
        assert run.drafted.stats.cycles + run.drafted.stats.accepted >= N_TOKENS - 1
    llm.close()
    assert measured.n_equal == 2
