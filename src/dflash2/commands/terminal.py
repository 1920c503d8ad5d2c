"""What every command shares: the two streams, and the types of common options."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console

FILE = click.Path(path_type=Path)
THREADS = click.IntRange(min=1, max=1024)
HELP = {"help_option_names": ["-h", "--help"]}
console = Console(highlight=False)
errors = Console(stderr=True, highlight=False)
