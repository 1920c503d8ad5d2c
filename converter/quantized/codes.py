"""Stored bytes as numbers: every weight format here keeps one or two weights in a byte, so a table of 256 entries
says all of it. The tables are written from the formats' definitions: OCP 8-bit floating point (E4M3), OCP
microscaling (E2M1, E8M0), and compressed-tensors' integers, packed with an offset of half their range.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dflash2.converter.safetensors_file import StoredTensor
from dflash2.converter.sources import WIDEN, Bytes, Floats
from dflash2.errors import CheckpointError

# Look-ups this long stay in the processor's cache, with the index numpy makes of them.
_LOOKUP = 1 << 16


@dataclass(frozen=True)
class Code:
    """How a byte is read: `values` is [256] for one weight a byte, [256, 2] for two, in storage order."""

    values: Floats
    dtype: str

    @property
    def per_byte(self) -> int:
        """Weights in a byte."""
        return self.values.size // 256

    def read(self, data: Bytes) -> Floats:
        """The weights of all bytes in order, flat."""
        entries = self.values if self.per_byte == 1 else self.values.view(np.complex64).reshape(-1)
        found = np.empty(data.size, entries.dtype)
        for start in range(0, data.size, _LOOKUP):
            # Every byte is a valid index; "clip" spares numpy's copy for the check.
            part = slice(start, start + _LOOKUP)
            np.take(entries, data[part], out=found[part], mode="clip")
        numbers: Floats = found.view(np.float32)
        return numbers


def _pairs(nibbles: Floats) -> Floats:
    """Two 4-bit values a byte, the low half first."""
    byte = np.arange(256)
    return np.stack([nibbles[byte & 15], nibbles[byte >> 4]], axis=1).astype(np.float32)


def _e4m3() -> Floats:
    """Sign, 4 bits of exponent with bias 7, 3 of mantissa; no infinities, all ones is NaN."""
    byte = np.arange(256)
    exponent, mantissa = byte >> 3 & 15, byte & 7
    magnitude = np.where(exponent == 0, np.ldexp(mantissa, -9), np.ldexp(8.0 + mantissa, exponent - 10))
    magnitude[byte & 127 == 127] = np.nan
    values: Floats = np.where(byte & 128, -magnitude, magnitude).astype(np.float32)
    return values


def _e2m1() -> Floats:
    """Sign, 2 bits of exponent with bias 1, 1 of mantissa."""
    magnitude = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    return np.concatenate([magnitude, -magnitude])


def _unsigned_zero(nibbles: Floats) -> Floats:
    """modelopt reads code 8 as zero without a sign."""
    return nibbles + np.float32(0)


E4M3 = Code(_e4m3(), "F8_E4M3")
INT8 = Code(np.arange(256).astype(np.uint8).view(np.int8).astype(np.float32), "I8")
PACKED_INT8 = Code(np.arange(-128, 128).astype(np.float32), "I32")
PACKED_INT4 = Code(_pairs(np.arange(-8, 8).astype(np.float32)), "I32")
E2M1 = Code(_pairs(_e2m1()), "U8")
E2M1_UNSIGNED_ZERO = Code(_pairs(_unsigned_zero(_e2m1())), "U8")

# Powers of two with bias 127; 255 is NaN. 2**-127 is below F32's normal numbers and exact.
_E8M0 = np.append(np.ldexp(1.0, np.arange(255) - 127), np.nan).astype(np.float32)


SCALES: dict[str, Callable[[Bytes], Floats]] = {
    **WIDEN,
    "F8_E4M3": E4M3.read,
    "F8_E8M0": lambda data: _E8M0[data],
    "U8": lambda data: _E8M0[data],
}
SCALE_FLOATS = ("F32", "F16", "BF16")
SCALE_EXPONENTS = ("F8_E8M0", "U8")


def read_integers(tensor: StoredTensor) -> npt.NDArray[np.int64]:
    """All values of a small I32 or I64 tensor, flat."""
    data = tensor.read(0, tensor.n_bytes)
    return data.view(np.int64 if tensor.dtype == "I64" else np.int32).astype(np.int64)


def read_scalar(tensor: StoredTensor, *, divisor: bool = False) -> np.float32:
    """The one value of a tensor of shape [] or [1]; it must be finite, and not zero if it is a `divisor`."""
    if tensor.shape not in ((), (1,)):
        raise CheckpointError(
            f"{tensor.path}: tensor {tensor.name!r} has shape {list(tensor.shape)} instead of one value; the"
            " checkpoint is damaged, quantise it again."
        )
    value = SCALES[tensor.dtype](tensor.read(0, tensor.n_bytes))[0]
    if not np.isfinite(value) or (divisor and value == 0):
        raise CheckpointError(
            f"{tensor.path}: tensor {tensor.name!r} is {value}, which is no scale; the checkpoint is damaged."
        )
    return np.float32(value)
