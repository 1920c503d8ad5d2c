"""How sure is a median? Intervals from order statistics, which ask nothing of the distribution."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import comb
from statistics import median

LEVEL = 0.95


@dataclass(frozen=True)
class MedianInterval:
    """The median of `n` values, and an interval that holds the true median with at least probability `confidence`.

    `low` and `high` are two of the values. Too few values cannot give every confidence: then they are the extremes,
    and `confidence` is what these give.
    """

    median: float
    low: float
    high: float
    confidence: float
    n: int

    def holds(self, value: float) -> bool:
        """Whether `value` lies within."""
        return self.low <= value <= self.high


def median_interval(values: Iterable[float], level: float = LEVEL) -> MedianInterval:
    """The median of `values` (at least one) with the narrowest interval of at least `level` that the sign test gives.

    The true median lies below the k-th smallest of n values with the chance that fewer than k of n fair coins fall
    heads: Thompson, Annals of Mathematical Statistics 7 (1936).
    """
    ordered = sorted(values)
    n = len(ordered)
    outside, k = 2.0 / 2**n, 1  # of the extremes
    while k < n // 2 and outside + 2 * comb(n, k) / 2**n <= 1 - level:
        outside += 2 * comb(n, k) / 2**n
        k += 1
    return MedianInterval(median(ordered), ordered[k - 1], ordered[n - k], max(0.0, 1 - outside), n)
