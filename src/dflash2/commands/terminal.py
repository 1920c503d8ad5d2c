"""What every command shares: the two streams, the display of progress, and the types of common options."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
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
_SHOWN_CHARACTERS = 80  # of what is being done: a server words some of it
THREADS = click.IntRange(min=1, max=1024)
HOST = click.option(
    "--host", metavar="HOST[:PORT]", help="The Ollama server. Default: OLLAMA_HOST, else 127.0.0.1:11434."
)
HELP = {"help_option_names": ["-h", "--help"]}
# No emoji: `:key:` in a path is no key.
console = _Console(highlight=False, emoji=False)
errors = _Console(stderr=True, highlight=False, emoji=False)


def cell(text: str) -> Text:
    """`text` for a table, as it is: no markup, nothing that steers the terminal."""
    return Text(printable(text))


@contextmanager
def progress_display() -> Iterator[Callable[[str, int, int | None], None]]:
    """A display on standard error: what it gives is called with (what is done, bytes done, bytes in all or None)."""
    tasks: dict[str, TaskID] = {}
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn())
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bar:

        def report(what: str, done: int, total: int | None) -> None:
            if what not in tasks:
                for task in bar.tasks:
                    task.visible = task.total is not None  # what has no measure ends when the next begins
                tasks[what] = bar.add_task(printable(" ".join(what[:_SHOWN_CHARACTERS].split())), total=total)
            bar.update(tasks[what], completed=done, total=total)

        yield report


@contextmanager
def counting(what: str) -> Iterator[Callable[[int, int], None]]:
    """A display on standard error of `what` is done: what it gives is called with (items done, items in all)."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
