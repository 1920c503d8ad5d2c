"""One answer of a check: what was looked at, what should be there, what is there, and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

Level = Literal["ok", "warning", "error"]
Fact: TypeAlias = "str | int | float | bool | list[int] | list[str] | None"


@dataclass(frozen=True)
class Finding:
    """One checked fact.

    `key` names the check (stable, part of the JSON schema); `expected` and `found` are values, `fix` says what to do
    and is empty where nothing is wrong.
    """

    level: Level
    key: str
    expected: Fact
    found: Fact
    fix: str = ""

    def to_dict(self) -> dict[str, Fact]:
        """The finding as JSON values, every field always there."""
        return {
            "level": self.level,
            "key": self.key,
            "expected": self.expected,
            "found": self.found,
            "fix": self.fix,
        }


def ok(key: str, found: Fact, expected: Fact = None) -> Finding:
    """A fact that is as it should be; without `expected`, it is what was found."""
    return Finding("ok", key, found if expected is None else expected, found)


def error(key: str, *, expected: Fact, found: Fact, fix: str) -> Finding:
    """A fact that keeps the pair from running, or from drafting anything useful."""
    return Finding("error", key, expected, found, fix)


def warning(key: str, *, expected: Fact, found: Fact, fix: str) -> Finding:
    """A fact that makes drafts worse, or that only some libraries can cope with."""
    return Finding("warning", key, expected, found, fix)


def problems(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The findings that are not ok, in their order."""
    return tuple(finding for finding in findings if finding.level != "ok")
