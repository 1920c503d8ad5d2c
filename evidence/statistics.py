"""Do counts fit probabilities? Pearson's chi-square test, its power, and Holm's correction for many of them."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import TypeVar

import numpy as np
import numpy.typing as npt

LEAST_EXPECTED = 5.0
LEVEL = 1e-3  # chance that any test of a set falls although every hypothesis holds
Key = TypeVar("Key", bound=Hashable)


def p_value(counts: npt.NDArray[np.int64], probabilities: npt.NDArray[np.float64]) -> float:
    """Of `counts` under `probabilities`, both of one shape; rare cells are pooled, an impossible count gives 0."""
    return fit(counts, probabilities)[0]


def fit(counts: npt.NDArray[np.int64], probabilities: npt.NDArray[np.float64]) -> tuple[float, int]:
    """`p_value`, and the degrees of freedom that pooling left."""
    observed, expected = counts.ravel().astype(float), probabilities.ravel() * counts.sum()
    possible = expected > 0
    if observed[~possible].any():
        return 0.0, max(1, int(possible.sum()) - 1)
    observed, expected = observed[possible], expected[possible]
    rare = expected < LEAST_EXPECTED
    if rare.any() and expected[rare].sum() < LEAST_EXPECTED and not rare.all():  # the pool itself must not be rare
        rare[np.argsort(np.where(rare, np.inf, expected))[0]] = True
    if rare.any():
        observed = np.append(observed[~rare], observed[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    if len(observed) < 2:
        return 1.0, 0
    freedom = len(observed) - 1
    return tail(float(((observed - expected) ** 2 / expected).sum()), freedom), freedom


def tail(statistic: float, freedom: float) -> float:
    """P(chi-square > statistic), by Wilson and Hilferty's cube root (good to a few percent of p down to 1e-6)."""
    if freedom == 1:
        return math.erfc(math.sqrt(statistic / 2))
    if freedom == 2:
        return math.exp(-statistic / 2)
    spread = 2 / (9 * freedom)
    return 0.5 * math.erfc(((statistic / freedom) ** (1 / 3) - 1 + spread) / math.sqrt(2 * spread))


def power(effect: float, n: int, freedom: int, level: float) -> float:
    """Chance that the test of `n` draws falls at `level` if the true probabilities are off by `effect`.

    `effect` is Cohen's w: the root of sum((p' - p)^2 / p). The statistic is then noncentral chi-square, taken for a
    scaled central one by Patnaik's first two moments.
    """
    shift = n * effect**2
    scale = (freedom + 2 * shift) / (freedom + shift)
    return tail(_critical(freedom, level) / scale, (freedom + shift) ** 2 / (freedom + 2 * shift))


def detectable(n: int, freedom: int, level: float, wanted: float = 0.9) -> float:
    """The smallest effect (Cohen's w) that the test finds with power `wanted`."""
    if freedom < 1:
        return math.inf
    low, high = 0.0, 1.0
    while power(high, n, freedom, level) < wanted:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if power(middle, n, freedom, level) >= wanted else (middle, high)
    return high


def _critical(freedom: int, level: float) -> float:
    """The statistic whose tail is `level`."""
    low, high = 0.0, freedom + 10.0
    while tail(high, freedom) > level:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (low, middle) if tail(middle, freedom) <= level else (middle, high)
    return high


def rejected(p_values: Mapping[Key, float], level: float = LEVEL) -> list[Key]:
    """Keys whose hypothesis falls by Holm's step-down procedure at `level` for the whole set."""
    fallen: list[Key] = []
    for rank, key in enumerate(sorted(p_values, key=p_values.__getitem__)):
        if p_values[key] >= level / (len(p_values) - rank):
            break
        fallen.append(key)
    return fallen
