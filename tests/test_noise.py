"""The counter-based noise: exactly defined, uniform, and independent along everything that it is keyed by."""

import numpy as np
import pytest

from dflash2.evidence.statistics import p_value, rejected
from dflash2.runtime.noise import Noise, _unit

IDS = np.arange(1000, dtype=np.int32)
POSITIONS = np.arange(1000)
GRID = np.broadcast_to(IDS, (1000, 1000))


def splitmix64(state, n):
    """Output n of the generator as its authors wrote it down, on Python's integers."""
    for _ in range(n + 1):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
    z = state
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def test_the_generator_is_splitmix64():
    assert splitmix64(1234567, 0) == 6457827717110365317  # published test vector
    assert splitmix64(1234567, 2) == 9817491932198370423


@pytest.mark.parametrize(("seed", "stream", "position"), [(0, 0, 0), (7, 0, 12), (2**32 - 2, 2, 100_000)])
def test_the_numbers_are_exactly_those_of_the_definition(seed, stream, position):
    start = splitmix64(splitmix64((seed << 32) + stream, 0), position)
    expected = [((splitmix64(start, token) >> 12) + 0.5) / 2**52 for token in range(20)]
    noise = Noise(seed, stream)
    assert noise.uniform(position, IDS[:20]).tolist() == expected
    assert noise.uniform(np.array([position]), GRID[:1, :20])[0].tolist() == expected
    assert noise.toss(position) == expected[0]
    np.testing.assert_allclose(noise.gumbel(position, IDS[:20]), -np.log(-np.log(expected)), rtol=1e-12)


def test_the_extremes_stay_inside_the_unit_interval():
    ends = _unit(np.array([0, 2**64 - 1], np.uint64))
    assert ends.tolist() == [2.0**-53, 1 - 2.0**-53]
    assert np.isfinite(-np.log(-np.log(ends))).all()


def in_bins(values, bins):
    return np.bincount((values.ravel() * bins).astype(int), minlength=bins)


def pairs(a, b, bins=16):
    return np.bincount((in_bin(a, bins) * bins + in_bin(b, bins)).ravel(), minlength=bins * bins)


def in_bin(values, bins):
    return (values * bins).astype(int)


def test_uniform_and_independent_along_every_key():
    grid = Noise(42).uniform(POSITIONS, GRID)
    same = np.full(256, 1 / 256)
    found = {
        "one dimension": p_value(in_bins(grid, 1000), np.full(1000, 1e-3)),
        "next token": p_value(pairs(grid[:, :-1], grid[:, 1:]), same),
        "next position": p_value(pairs(grid[:-1], grid[1:]), same),
        "diagonal": p_value(pairs(grid[:-1, :-1], grid[1:, 1:]), same),
        "position + 256": p_value(pairs(grid[:-256], grid[256:]), same),
        "token + 512": p_value(pairs(grid[:, :-512], grid[:, 512:]), same),
        "next seed": p_value(pairs(grid, Noise(43).uniform(POSITIONS, GRID)), same),
        "next stream": p_value(pairs(grid, Noise(42, 1).uniform(POSITIONS, GRID)), same),
        "low bits": p_value(in_bins(grid * 2**30 % 1, 1000), np.full(1000, 1e-3)),
        "three tokens": p_value(
            np.bincount((pairs_of(grid[:, 0:999:3], grid[:, 1:999:3]) * 8 + in_bin(grid[:, 2:999:3], 8)).ravel()),
            np.full(512, 1 / 512),
        ),
    }
    assert rejected(found) == []


def pairs_of(a, b):
    return in_bin(a, 8) * 8 + in_bin(b, 8)


def test_each_row_and_each_column_is_uniform():
    """Kolmogorov-Smirnov distances of 2,000 samples of 1,000; the bound is p = 1e-3 after Bonferroni."""
    grid = Noise(9).uniform(POSITIONS, GRID)
    steps = np.arange(1, 1001)[:, None] / 1000
    for samples in (grid, grid.T):
        ranked = np.sort(samples, axis=0)
        distance = np.maximum(steps - ranked, ranked - steps + 1e-3).max(axis=0)
        assert distance.max() < np.sqrt(np.log(2 * 2000 / 1e-3) / 2 / 1000)


def test_a_gumbel_argmax_draws_with_the_weights():
    weights = np.array([0.5, 0.3, 0.15, 0.05, 0.0])
    with np.errstate(divide="ignore"):
        logs = np.log(weights)
    ids = np.array([7, 3, 900, 12, 5], np.int32)
    noise = Noise(1)
    drawn = np.bincount([noise.draw(position, ids, logs) for position in range(20_000)], minlength=5)
    assert p_value(drawn, weights) > 1e-3


@pytest.mark.parametrize("spread", [0.0, 1.0, 5.0, 30.0])
def test_a_draw_among_many_is_the_argmax_over_all(spread):
    random = np.random.default_rng(int(spread))
    ids = random.permutation(20_000).astype(np.int32)
    for position in range(50):
        logs = (random.normal(size=20_000) * spread).astype(np.float32)
        logs[::7] = -np.inf
        expected = int((logs + Noise(3).gumbel(position, ids)).argmax())
        assert Noise(3).draw(position, ids, logs) == expected


@pytest.mark.parametrize("n", [3, 10_000])
def test_a_draw_of_nothing_says_so(n):
    ids = np.arange(n, dtype=np.int32)
    assert Noise(1).draw(0, ids, np.full(n, -np.inf)) == -1
    assert Noise(1).draw(0, ids, np.full(n, np.nan)) == -1
