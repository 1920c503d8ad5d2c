"""One metadata key of a GGUF file with its exact type."""

from __future__ import annotations

from dataclasses import dataclass, field

from gguf.constants import GGUFValueType

from dflash2.gguf_info import MetadataValue, ValueType, decode_value

U32 = ValueType(GGUFValueType.UINT32)
F32 = ValueType(GGUFValueType.FLOAT32)
BOOL = ValueType(GGUFValueType.BOOL)
STRING = ValueType(GGUFValueType.STRING)
STRINGS = ValueType(GGUFValueType.ARRAY, GGUFValueType.STRING)
INTEGERS = ValueType(GGUFValueType.ARRAY, GGUFValueType.INT32)
FLOATS = ValueType(GGUFValueType.ARRAY, GGUFValueType.FLOAT32)
BOOLS = ValueType(GGUFValueType.ARRAY, GGUFValueType.BOOL)


_LARGEST_F32, _LEAST_F32 = 3.4028234663852886e38, 1.1754943508222875e-38


def fits_f32(value: float) -> bool:
    """Whether `value` is zero, or a number that stays finite and normal as an F32: none turns into 0 or infinity."""
    return value == 0 or _LEAST_F32 <= abs(value) <= _LARGEST_F32


@dataclass(frozen=True)
class Entry:
    """One metadata key, the value to store and how it is stored.

    `encoded`, if given, goes into the file as it is instead of `value`, which is empty then: an array of another GGUF
    file as it stands after its key (`GGUFInfo.encoded`).
    """

    key: str
    value: MetadataValue
    type: ValueType
    encoded: bytes | None = field(default=None, repr=False)

    def decoded(self) -> MetadataValue:
        """The value, in whichever form it is held."""
        return self.value if self.encoded is None else decode_value(self.encoded)
