"""Every command and option of `dflash2` that the README and docs/ show exists."""

import re
from pathlib import Path

import click
import pytest

from dflash2.cli import cli

ROOT = Path(__file__).parents[1]
PAGES = [page for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if page.name != "reference.md"]


def shown(page: Path) -> list[str]:
    """The command lines in code, continued ones joined; what stands behind a comment or ` -- ` is not ours."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    blocks = re.findall(r"^```(?:sh|text|console)?\n(.*?)^```", text, re.M | re.S)
    spans = re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))
    lines = [line for block in blocks for line in block.splitlines()] + [" ".join(span.split()) for span in spans]
    found = [re.search(r"(?:^|[\s(|;])(dflash2 [a-z].*)", line) for line in lines]
    return [re.split(r"\s#\s|\s--\s|[|;]\s", one.group(1))[0] for one in found if one]


def command_of(words: list[str]) -> tuple[click.Command, list[str]]:
    """The command that `words` name, and the rest of them."""
    command: click.Command = cli
    while words and isinstance(command, click.Group):
        if words[0] not in command.commands:
            if command.name != "bench":  # `dflash2 bench TARGET` is `dflash2 bench run TARGET`
                raise KeyError(words[0])
            words = ["run", *words]
        command, words = command.commands[words[0]], words[1:]
    return command, words


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_that_are_shown_exist(page):
    unknown = []
    for line in shown(page):
        try:
            command, rest = command_of(re.findall(r"[^\s\[\],`]+", line)[1:])
        except KeyError:
            unknown.append(line)
            continue
        options = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
        options |= {"--help", "--debug"}
        unknown += [line for word in rest if word.startswith("-") and word.split("=")[0] not in options]
    assert unknown == []


def test_the_pages_show_commands():
    assert sum(len(shown(page)) for page in PAGES) > 60
