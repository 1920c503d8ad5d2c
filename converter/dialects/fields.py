"""Typed look-up of config.json values; every refusal names the file, the key and what to do."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash2.converter.entry import fits_f32
from dflash2.errors import CheckpointError
from dflash2.regular_file import open_file
from dflash2.text import HALF_CHARACTER, NOT_TEXT

JsonObject = Mapping[str, Any]
# Largest value of the format's u32 that is also a sane count.
_MAX_INTEGER = 2**31 - 1
# An escape in the JSON that spells half a character, or one of two halves.
_MAY_BE_HALF = re.compile(r"\\u[dD][89a-fA-F]")


@dataclass(frozen=True)
class Fields:
    """Values of one config file: `scopes` are searched in order; null counts as absent."""

    path: Path
    scopes: tuple[JsonObject, ...]
    prefix: str = ""

    def get(self, key: str) -> Any:
        """The raw value of `key`, None if absent."""
        for scope in self.scopes:
            if scope.get(key) is not None:
                return scope[key]
        return None

    def wrong(self, key: str, problem: str) -> CheckpointError:
        """The error for a bad value of `key`."""
        return CheckpointError(f"{self.path}: {self.prefix + key!r} {problem}.")

    def missing(self, key: str, flag: str = "") -> CheckpointError:
        """The error for an absent `key`; `flag` is the option that can fill in for it."""
        way = f", or give it with {flag}" if flag else ""
        return self.wrong(key, f"is missing; add the value the drafter was trained with{way}")

    def optional_integer(self, key: str, minimum: int = 1, maximum: int = _MAX_INTEGER) -> int | None:
        """An integer in a closed range; floats without a fraction are taken."""
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            raise self.wrong(key, f"is {_show(value)}, not an integer from {minimum} to {maximum}")
        return value

    def integer(self, key: str, minimum: int = 1, maximum: int = _MAX_INTEGER, flag: str = "") -> int:
        """Like `optional_integer`, required; `flag` names the option that can fill in for it."""
        value = self.optional_integer(key, minimum, maximum)
        if value is None:
            raise self.missing(key, flag)
        return value

    def optional_number(self, key: str) -> float | None:
        """A number that is finite as a 32-bit float, and not 0 unless it is 0."""
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not fits_f32(value):
            raise self.wrong(key, f"is {_show(value)}, not a finite number that 32 bits hold")
        return float(value)

    def number(self, key: str) -> float:
        """Like `optional_number`, required and positive."""
        value = self.optional_number(key)
        if value is None:
            raise self.missing(key)
        if value <= 0:
            raise self.wrong(key, f"is {value}, not a positive number")
        return value

    def flag(self, key: str) -> bool | None:
        """True, False, or None if absent."""
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(key, f"is {_show(value)}, not true or false")
        return value

    def text(self, key: str) -> str | None:
        """A string, None if absent."""
        value = self.get(key)
        if value is not None and not isinstance(value, str):
            raise self.wrong(key, f"is {_show(value)}, not a string")
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        """A required, non-empty list of integers from 0."""
        value = self.get(key)
        if value is None:
            raise self.missing(key)
        if not isinstance(value, list) or not value or not all(_is_count(item) for item in value):
            raise self.wrong(key, f"is {_show(value)}, not a list of integers from 0")
        return tuple(value)

    def agreed(self, key: str, flag: str) -> Fields:
        """These fields, unless two levels give `key` different values: then one is junk, and `flag` settles which."""
        values = [scope[key] for scope in self.scopes if scope.get(key) is not None]
        if any(value != values[0] for value in values):
            shown = " and ".join(_show(value) for value in values)
            raise self.wrong(key, f"is {shown} at different levels; correct one, or give it with {flag}")
        return self

    def section(self, key: str) -> JsonObject:
        """A JSON object, empty if absent."""
        value = self.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.wrong(key, f"is {_show(value)}, not a JSON object")
        return value


def load_json_object(path: Path) -> JsonObject:
    """The JSON object in `path`; raises CheckpointError if it is missing, not JSON, or not an object."""
    try:
        with open_file(path) as file:
            text = file.read().decode("utf-8-sig")
        value = json.loads(text, object_pairs_hook=unique_keys)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path.parent} has no {path.name}; give the folder of a drafter checkpoint.") from error
    except OSError as error:
        raise CheckpointError(f"Cannot read {path}: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); download it again.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is not a JSON object; download it again.")
    if _MAY_BE_HALF.search(text):
        _refuse_half_characters(path, value)
    return value


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object of `pairs`; raises ValueError if a name appears twice, as readers differ on which one counts."""
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"the name {key!r} appears twice")
        values[key] = value
    return values


def _refuse_half_characters(path: Path, value: JsonObject) -> None:
    """JSON can spell half a character (a lone surrogate), which no file can hold as text."""
    below: list[tuple[str, object]] = [("", value)]
    while below:
        name, inner = below.pop()
        if isinstance(inner, str) and HALF_CHARACTER.search(inner):
            raise CheckpointError(f"{path}: {name!r} {NOT_TEXT}")
        if isinstance(inner, dict):
            for key, item in inner.items():
                if HALF_CHARACTER.search(key):
                    raise CheckpointError(f"{path}: the key {key!r} {NOT_TEXT}")
                below.append((f"{name}.{key}" if name else key, item))
        elif isinstance(inner, list):
            below += [(name, item) for item in inner]


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_INTEGER


def _show(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
