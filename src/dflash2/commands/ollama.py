"""`dflash2 ollama`: what is done to an Ollama."""

from __future__ import annotations

import click

from dflash2.commands.ollama_runner import runner


@click.group()
def ollama() -> None:
    """Ollama: the program it runs models with."""


ollama.add_command(runner)
