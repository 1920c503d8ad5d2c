"""Gumbel noise from a counter: the same for a (seed, position, token) whoever asks, in whatever order.

The generator is splitmix64 (Steele, Lea, Flood 2014): output i of the stream that starts at a state s is
mix(s + (i + 1) * GOLDEN). Here every (seed, stream, position) has a start of its own, itself two rounds of mix, and the
token id counts within it. Integers only, so the uniform numbers are the same on every platform; their logarithms are
the platform's, right to the last bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dflash2.native import FloatArray, IntArray

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_A, _MIX_B = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = 2**64 - 1
# u = (top 52 bits + 1/2) / 2^52: exact in a double and never 0 or 1, so |g| stays below 37.
_BITS = 52
_MANY = 4096  # candidates from which `draw` looks for the few that can win first
_MARGIN = 1.001  # covers the rounding of that first look


@dataclass(frozen=True)
class Noise:
    """Independent noise for each `stream` of a `seed` (any two whole numbers below 2^32)."""

    seed: int
    stream: int = 0

    def uniform(self, position: int | IntArray, ids: IntArray) -> npt.NDArray[np.float64]:
        """Numbers in (0, 1) for tokens `ids` at `position`; positions [n] go with ids [n, ...]."""
        return _unit(self._hash(position, ids))

    def toss(self, position: int) -> float:
        """One number in (0, 1): `uniform` for token 0 at `position`."""
        hashed = _mix_int(_start(self.seed, self.stream, position) + _GOLDEN & _MASK)
        return ((hashed >> 64 - _BITS) + 0.5) * 2.0**-_BITS

    def gumbel(self, position: int | IntArray, ids: IntArray) -> npt.NDArray[np.float64]:
        """Standard Gumbel noise, -log(-log(u)), for tokens `ids` at `position`, shaped as in `uniform`."""
        noise: npt.NDArray[np.float64] = -np.log(-np.log(self.uniform(position, ids)))
        return noise

    def draw(self, position: int, ids: IntArray, log_weights: npt.NDArray[np.floating]) -> int:
        """Index of the token drawn among `ids` [m], with probability softmax(`log_weights`): argmax of sum with noise.

        -inf is a weight of nothing. -1 if none has a weight.
        """
        if len(ids) > _MANY:
            hashes = self._hash(position, ids)
            few = _contenders(hashes, log_weights)
            noise = -np.log(-np.log(_unit(hashes[few])))
        else:
            few, noise = None, self.gumbel(position, ids)
        keys = (log_weights if few is None else log_weights[few]) + noise
        best = int(keys.argmax()) if len(keys) else -1
        if best < 0 or not keys[best] > -np.inf:
            return -1
        return best if few is None else int(few[best])

    def _hash(self, position: int | IntArray, ids: IntArray) -> npt.NDArray[np.uint64]:
        if isinstance(position, int):
            start: npt.NDArray[np.uint64] | np.uint64 = np.uint64(_start(self.seed, self.stream, position))
        else:
            starts = np.array([_start(self.seed, self.stream, at) for at in position.tolist()], np.uint64)
            start = starts.reshape(-1, *[1] * (ids.ndim - 1))
        counters = ids.astype(np.uint64)
        counters += np.uint64(1)
        counters *= np.uint64(_GOLDEN)
        return _mix(counters + start)


def _start(seed: int, stream: int, position: int) -> int:
    """Where the stream of one position starts."""
    state = _mix_int((seed << 32 | stream) + _GOLDEN & _MASK)
    return _mix_int(state + (position + 1) * _GOLDEN & _MASK)


def _mix_int(z: int) -> int:
    z = (z ^ z >> 30) * _MIX_A & _MASK
    z = (z ^ z >> 27) * _MIX_B & _MASK
    return z ^ z >> 31


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """splitmix64's output function, in place; arithmetic is modulo 2^64."""
    for shift, factor in ((30, _MIX_A), (27, _MIX_B)):
        z ^= z >> np.uint64(shift)
        z *= np.uint64(factor)
    z ^= z >> np.uint64(31)
    return z


def _unit(hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    units: npt.NDArray[np.float64] = ((hashes >> np.uint64(64 - _BITS)).astype(np.float64) + 0.5) * 2.0**-_BITS
    return units


def _contenders(hashes: npt.NDArray[np.uint64], log_weights: npt.NDArray[np.floating]) -> npt.NDArray[np.intp]:
    """Indices among which the winner is: those whose noise could lift them to what the likeliest token reaches.

    g >= x means -log(u) <= exp(-x), and 1 - u <= -log(u): so 1 - u <= exp(-x) is necessary, and cheap.
    """
    favourite = int(log_weights.argmax())
    reach = float(log_weights[favourite] - np.log(-np.log(_unit(hashes[favourite : favourite + 1])))[0])
    rest: FloatArray = (~hashes >> np.uint64(64 - 24)).astype(np.float32) * np.float32(2.0**-24)  # at most 1 - u
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        bound = np.exp((log_weights - reach).astype(np.float32)) * np.float32(_MARGIN)
    return np.flatnonzero(rest <= bound)
