"""What every command shares: the two streams, and the types of common options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console


class _File(click.Path):
    """A path, which is not empty: an empty one would stand for the current folder."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path; a usage error if it is empty."""
        if value == "":
            self.fail("the path is empty; give a file or a folder.", param, ctx)
        return super().convert(value, param, ctx)


FILE = _File(path_type=Path)
THREADS = click.IntRange(min=1, max=1024)
HELP = {"help_option_names": ["-h", "--help"]}
console = Console(highlight=False)
errors = Console(stderr=True, highlight=False)
