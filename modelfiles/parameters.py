"""What `ollama create` makes of the text of a PARAMETER: whole numbers, fractions, switches, stop texts."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Literal, TypeAlias

from dflash2.errors import ModelfileError

Kind = Literal["int", "float", "bool", "text"]
Value: TypeAlias = "int | float | bool | str"

DRAFT_NUM_PREDICT = "draft_num_predict"
NUM_CTX = "num_ctx"
STOP = "stop"
# fmt: off
KINDS: dict[str, Kind] = {
    **dict.fromkeys((
        "num_keep", "seed", "num_predict", "top_k", "repeat_last_n", NUM_CTX, "num_batch", "num_gpu", "main_gpu",
        "num_thread", DRAFT_NUM_PREDICT,
    ), "int"),
    **dict.fromkeys((
        "top_p", "min_p", "typical_p", "temperature", "repeat_penalty", "presence_penalty", "frequency_penalty",
    ), "float"),
    "use_mmap": "bool",
    STOP: "text",
}
# Taken with a warning, and without effect.
DEPRECATED = frozenset({
    "penalize_newline", "low_vram", "f16_kv", "logits_all", "vocab_only", "use_mlock", "mirostat", "mirostat_tau",
    "mirostat_eta",
})
# fmt: on
_TRUE = frozenset({"1", "t", "T", "true", "TRUE", "True"})
_FALSE = frozenset({"0", "f", "F", "false", "FALSE", "False"})
# The numbers that Go reads.
_INT = re.compile(r"[+-]?[0-9]+")
_INT_LIMIT = 1 << 63
_DIGITS, _HEX = "[0-9]+(?:_[0-9]+)*", "[0-9a-f]+(?:_[0-9a-f]+)*"
_FLOAT = re.compile(
    rf"[+-]?(?:inf(?:inity)?|(?:{_DIGITS}(?:\.(?:{_DIGITS})?)?|\.{_DIGITS})(?:e[+-]?{_DIGITS})?)|nan", re.IGNORECASE
)
_HEX_FLOAT = re.compile(rf"[+-]?0x_?(?:{_HEX}(?:\.(?:{_HEX})?)?|\.{_HEX})p[+-]?{_DIGITS}", re.IGNORECASE)
# The largest number of 32 bits, and halfway from it to the next power of two: what is below is rounded to the largest.
_FLOAT32_MAX, _FLOAT32_END = (2 - 2**-23) * 2.0**127, (2 - 2**-24) * 2.0**127


def parameter_value(name: str, text: str) -> Value:
    """The typed value of PARAMETER `name`; raises ModelfileError in Ollama's words for an unknown name or bad text."""
    kind = KINDS.get(name)
    if kind is None:
        raise ModelfileError(f"unknown parameter '{name}'")
    value = _READERS[kind](text)
    if value is None:
        raise ModelfileError(f"invalid {kind} value [{text}]")
    return value


def _int(text: str) -> int | None:
    # A number of more digits is refused before Python reads it, which has a limit of its own.
    if not _INT.fullmatch(text) or len(text.lstrip("+-").lstrip("0")) > len(str(_INT_LIMIT)):
        return None
    value = int(text)
    return value if -_INT_LIMIT <= value < _INT_LIMIT else None


def _float(text: str) -> float | None:
    bare = text.replace("_", "")
    try:
        if _FLOAT.fullmatch(text):
            value = float(bare)
            too_large = math.isinf(value) and "inf" not in bare.lower()
            if abs(value) == _FLOAT32_END:  # which a text just below it is rounded to, too
                too_large = Decimal(bare).copy_abs() >= Decimal(_FLOAT32_END)
                value = value if too_large else math.copysign(_FLOAT32_MAX, value)
        elif _HEX_FLOAT.fullmatch(text):
            value, too_large = float.fromhex(bare), False
        else:
            return None
    except OverflowError:
        return None
    too_large = too_large or (math.isfinite(value) and abs(value) >= _FLOAT32_END)
    return None if too_large else value


def _bool(text: str) -> bool | None:
    return True if text in _TRUE else False if text in _FALSE else None


def _text(text: str) -> str:
    return text


_READERS = {"int": _int, "float": _float, "bool": _bool, "text": _text}
