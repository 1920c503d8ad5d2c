"""Text that can be stored: JSON and YAML can spell half a character (a lone surrogate), which has no bytes."""

from __future__ import annotations

import re

HALF_CHARACTER = re.compile(r"[\ud800-\udfff]")
NOT_TEXT = "is not text (a lone surrogate); correct or remove it."
