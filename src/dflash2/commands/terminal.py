"""What every command shares: the two streams, and the types of common options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from dflash2.text import printable


class _File(click.Path):
    """A path, which is not empty: an empty one would stand for the current folder."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path; a usage error if it is empty."""
        if value == "":
            self.fail("the path is empty; give a file or a folder.", param, ctx)
        return super().convert(value, param, ctx)


class _Console(Console):
    """A stream that shows what comes from files and servers without letting it steer the terminal."""

    def render_str(self, text: str, **options: Any) -> Text:
        """What rich makes of every string, in a table too, after escaping it."""
        return super().render_str(printable(text), **options)


FILE = _File(path_type=Path)
THREADS = click.IntRange(min=1, max=1024)
HELP = {"help_option_names": ["-h", "--help"]}
console = _Console(highlight=False)
errors = _Console(stderr=True, highlight=False)


def cell(text: str) -> Text:
    """`text` for a table, as it is: no markup, nothing that steers the terminal."""
    return Text(printable(text))
