"""Text from outside: what can be stored, and what can be shown.

JSON and YAML can spell half a character (a lone surrogate), which has no bytes.
"""

from __future__ import annotations

import re

HALF_CHARACTER = re.compile(r"[\ud800-\udfff]")
NOT_TEXT = "is not text (a lone surrogate); correct or remove it."


def printable(text: str) -> str:
    """`text` as a terminal may have it: all but line ends, tabs and characters that print is escaped, as in Python."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)
