"""Writes docs/reference.md, the reference of every command, from the commands themselves (`make docs`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from dflash2.cli import cli

PAGE = Path(__file__).with_name("reference.md")
_HEAD = """# Every command and option

Written by `make docs` from the commands themselves; a test fails when it is stale. `dflash2 COMMAND --help` shows the
same. `dflash2-convert` is `dflash2 convert` under a name of its own.
"""
_WIDTH = 10_000  # a usage line stays one line


def reference() -> str:
    """The page, in Markdown."""
    return "\n".join([_HEAD, *_sections(cli, None, "dflash2")]).rstrip() + "\n"


def _sections(command: click.Command, parent: click.Context | None, name: str) -> Iterator[str]:
    settings = command.context_settings | {"max_content_width": _WIDTH, "terminal_width": _WIDTH}
    context = click.Context(command, parent, info_name=name, **settings)
    yield from _section(command, context)
    if isinstance(command, click.Group):
        for child in command.list_commands(context):
            found = command.get_command(context, child)
            if found is not None and not found.hidden:
                yield from _sections(found, context, child)


def _section(command: click.Command, context: click.Context) -> Iterator[str]:
    yield f"## `{context.command_path}`\n"
    yield f"```text\n{context.get_usage().removeprefix('Usage: ')}\n```\n"
    for paragraph in (command.help or "").replace("\b\n", "").split("\n\n"):
        yield " ".join(paragraph.split()) + "\n"
    options = [option for option in command.get_params(context) if isinstance(option, click.Option)]
    rows = [record for option in options if (record := option.get_help_record(context))]
    if rows:
        yield "| option | meaning |\n|---|---|"
        yield from (f"| `{_cell(names)}` | {_cell(meaning).replace('<', '&lt;')} |" for names, meaning in rows)
        yield ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(reference(), encoding="utf-8")
