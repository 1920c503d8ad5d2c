"""The chi-square test, its power and Holm's procedure, against simulation."""

import numpy as np
import pytest

from dflash2.evidence.statistics import detectable, fit, p_value, power, rejected, tail


@pytest.mark.parametrize(
    ("freedom", "statistic", "expected"), [(1, 3.841, 0.05), (5, 11.070, 0.05), (20, 45.315, 0.001)]
)
def test_tails_are_those_of_the_tables(freedom, statistic, expected):
    assert tail(statistic, freedom) == pytest.approx(expected, rel=0.05)


def test_true_probabilities_are_rejected_as_often_as_the_level_says():
    random = np.random.default_rng(1)
    p = random.dirichlet(np.ones(12))
    found = np.array([p_value(counts, p) for counts in random.multinomial(2000, p, 4000)])
    assert 0.04 < (found < 0.05).mean() < 0.06


@pytest.mark.parametrize(("n", "cells", "level"), [(2000, 8, 1e-3), (600, 30, 1e-2)])
def test_the_detectable_effect_is_found_with_the_power_that_is_stated(n, cells, level):
    random = np.random.default_rng(2)
    effect = detectable(n, cells - 1, level)
    p = np.full(cells, 1 / cells)
    shift = np.where(np.arange(cells) % 2, 1, -1) * effect / cells  # Cohen's w is then `effect`
    found = np.array([p_value(counts, p) for counts in random.multinomial(n, p + shift, 3000)])
    assert (found < level).mean() == pytest.approx(0.9, abs=0.03)
    assert power(effect, n, cells - 1, level) == pytest.approx(0.9, abs=0.001)


def test_an_impossible_count_has_no_probability():
    assert fit(np.array([10, 1]), np.array([1.0, 0.0]))[0] == 0.0
    assert fit(np.array([10, 0]), np.array([1.0, 0.0])) == (1.0, 0)


def test_holm_takes_the_smallest_first():
    assert rejected({"a": 0.0004, "b": 0.0006, "c": 0.5}, level=1e-3) == []
    assert rejected({"a": 0.0003, "b": 0.0004, "c": 0.5}, level=1e-3) == ["a", "b"]
