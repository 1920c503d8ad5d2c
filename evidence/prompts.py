"""Prompts: the built-in sets, all written for this package, and how to choose among them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from dflash2.errors import OptionError

# Five kinds of text, and five in the style of a public benchmark (none of its items).
CATEGORIES = ("code", "maths", "chat", "prose", "json")
STYLES = ("gsm8k-style", "math-500-style", "humaneval-style", "mbpp-style", "mt-bench-style")


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Attributes:
        id: unique, such as `code-3`.
        category: the set it is of.
        text: what is continued, or the user's first message.
        turns: the user's messages after the first answer, if it is a conversation.
    """

    id: str
    category: str
    text: str
    turns: tuple[str, ...] = ()


def builtin_prompts(categories: Sequence[str] = CATEGORIES, *, most: int | None = None) -> tuple[Prompt, ...]:
    """The built-in prompts of `categories` (of CATEGORIES and STYLES), the first `most` of each.

    Raises OptionError for a category that is not there.
    """
    return tuple(prompt for category in categories for prompt in _category(category)[:most])


@cache
def _category(name: str) -> tuple[Prompt, ...]:
    if name not in (*CATEGORIES, *STYLES):
        known = ", ".join((*CATEGORIES, *STYLES))
        raise OptionError(f"There is no built-in prompt set {name!r}; choose among {known}.")
    text = (files("dflash2.evidence") / "prompt_sets" / f"{name}.json").read_text(encoding="utf-8")
    return tuple(
        Prompt(f"{name}-{number}", name, entry["text"], tuple(entry.get("turns", ())))
        for number, entry in enumerate(json.loads(text), 1)
    )


def texts(prompts: Iterable[str], category: str = "own") -> tuple[Prompt, ...]:
    """Prompts of the user's own `prompts`, numbered."""
    return tuple(Prompt(f"{category}-{number}", category, text) for number, text in enumerate(prompts, 1))
