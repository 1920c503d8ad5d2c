"""What the kernels compute, in float64 numpy, written from the formulas and not from the kernels."""

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
