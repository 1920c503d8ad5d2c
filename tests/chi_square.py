"""Do counts fit probabilities? Pearson's chi-square test, and Holm's correction for many of them."""

import math

import numpy as np

LEAST_EXPECTED = 5.0


def p_value(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Of `counts` under `probabilities`, both of one shape; rare cells are pooled, an impossible count gives 0."""
    counts, expected = counts.ravel().astype(float), probabilities.ravel() * counts.sum()
    possible = expected > 0
    if counts[~possible].any():
        return 0.0
    counts, expected = counts[possible], expected[possible]
    rare = expected < LEAST_EXPECTED
    if rare.any() and expected[rare].sum() < LEAST_EXPECTED and not rare.all():  # the pool itself must not be rare
        rare[np.argsort(np.where(rare, np.inf, expected))[0]] = True
    if rare.any():
        counts = np.append(counts[~rare], counts[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    if len(counts) < 2:
        return 1.0
    return tail(float(((counts - expected) ** 2 / expected).sum()), len(counts) - 1)


def tail(statistic: float, freedom: int) -> float:
    """P(chi-square > statistic), by Wilson and Hilferty's cube root (good to a few percent of p down to 1e-6)."""
    if freedom == 1:
        return math.erfc(math.sqrt(statistic / 2))
    if freedom == 2:
        return math.exp(-statistic / 2)
    spread = 2 / (9 * freedom)
    return 0.5 * math.erfc(((statistic / freedom) ** (1 / 3) - 1 + spread) / math.sqrt(2 * spread))


def rejected(p_values: dict, level: float = 1e-3) -> list:
    """Keys whose hypothesis falls by Holm's step-down procedure at `level` for the whole set."""
    fallen = []
    for rank, key in enumerate(sorted(p_values, key=p_values.get)):
        if p_values[key] >= level / (len(p_values) - rank):
            break
        fallen.append(key)
    return fallen
