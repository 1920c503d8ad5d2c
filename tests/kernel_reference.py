"""What the kernels compute, in float64 numpy, from the formulas and not from the kernels; and rows hard for them."""

import numpy as np


def conv_float64(x: np.ndarray, delta: np.ndarray, base: np.ndarray, sizes: tuple[int, ...]) -> np.ndarray:
    """out[i, c] = sum_t (base[side, t, c] + delta[i, side, t, c // group]) * x[i - t, c] inside each block.

    `x` [rows, width], `delta` [rows, 2, taps, n_groups], `base` [2, taps, width], `sizes` as in ConvShape.
    """
    group, _, taps, block, n_blocks, side = sizes
    blocks = x.astype(np.float64).reshape(n_blocks, block, -1)
    weights = np.repeat(delta.astype(np.float64)[:, side], group, axis=-1) + base.astype(np.float64)[side]
    weights = weights.reshape(n_blocks, block, taps, -1)
    out = np.zeros_like(blocks)
    for t in range(min(taps, block)):
        out[:, t:] += weights[:, t:, t] * blocks[:, : block - t]
    return out.reshape(x.shape)


def selector_float64(
    predecessor: np.ndarray, successor: np.ndarray, gate: np.ndarray, unary: np.ndarray, ids: np.ndarray
) -> np.ndarray:
    """Lattice rows `[ids of position i + 1 | S(a, b), predecessor-major]`, [n_blocks, block - 1, k + k * k].

    S(a, b) = unary[i + 1, b] + <predecessor[i, a] * gate[i + 1], successor[i + 1, b]>; `predecessor` and `successor`
    [n_blocks, block, k, rank], `gate` [n_blocks, block, rank], `unary` and `ids` [n_blocks, block, k].
    """
    scores = np.einsum(
        "niar,nir,nibr->niab",
        predecessor[:, :-1].astype(np.float64),
        gate[:, 1:].astype(np.float64),
        successor[:, 1:].astype(np.float64),
    )
    scores += unary[:, 1:, None].astype(np.float64)
    return np.concatenate([ids[:, 1:].astype(np.float64), scores.reshape(*scores.shape[:2], -1)], axis=-1)


def hard_rows(n: int, last: int) -> dict[str, np.ndarray]:
    """Rows of `n` values on which a top-k may fail; `last` is the second of the two that are not masked."""
    rising = np.arange(n, dtype=np.float32)
    mostly_masked = np.full(n, -np.inf, np.float32)
    mostly_masked[[3, last]] = [1, -2]
    return {
        "rising": rising,
        "falling": rising[::-1],
        "equal": np.full(n, 0.5, np.float32),
        "two values": (rising % 300 == 7).astype(np.float32),
        "minus infinity": mostly_masked,
        "infinite": np.where(rising % 1000 == 999, np.float32(np.inf), rising),
    }
