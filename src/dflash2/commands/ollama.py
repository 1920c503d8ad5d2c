"""`dflash2 ollama`: what is done to an Ollama."""

from __future__ import annotations

import click

from dflash2.commands.ollama_create import create
from dflash2.commands.ollama_runner import runner
from dflash2.commands.ollama_status import status
from dflash2.commands.terminal import HELP


@click.group(context_settings=HELP)
def ollama() -> None:
    """Ollama: models with a draft, whether the draft is used, and the program that it runs models with."""


for command in (create, status, runner):
    ollama.add_command(command)
