"""What commands that make an Ollama model share: the options for all that goes into it beside target and drafter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from dflash2.modelfiles import DRAFT_NUM_PREDICT, NUM_CTX, ROLES, STOP

_Command = TypeVar("_Command", bound=Callable[..., Any])

_TEXT = "TEXT|@FILE"


def _texts(_context: click.Context, _option: click.Parameter, given: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Texts as they are, or those of the files behind an @; `@@` stands for one that is meant."""
    return tuple(map(_text, (given,) if isinstance(given, str) else given or ()))


def _text(given: str) -> str:
    if given.startswith("@@"):
        return given[1:]
    return _read(Path(given[1:])) if given.startswith("@") else given


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise click.BadParameter(f"{path} is no UTF-8 text; save it as such.") from error


def _parameters(
    _context: click.Context, _option: click.Parameter, given: tuple[str, ...]
) -> dict[str, tuple[str, ...]]:
    """NAME=VALUE by name; only `stop` may be given more than once."""
    found: dict[str, tuple[str, ...]] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise click.BadParameter(f"{text!r} is not NAME=VALUE, as 'temperature=0.7'.")
        if name in found and name != STOP:
            raise click.BadParameter(f"{name} is given twice; only {STOP} may be.")
        found[name] = (*found.get(name, ()), value)
    return found


_OPTIONS = (
    click.option("--num-ctx", type=click.IntRange(min=1), metavar="N", help="Tokens of context: PARAMETER num_ctx."),
    click.option(
        "--parameter",
        "parameters",
        metavar="NAME=VALUE",
        multiple=True,
        callback=_parameters,
        help="Any other PARAMETER; may be repeated.",
    ),
    click.option(
        "--template",
        metavar=_TEXT,
        callback=_texts,
        help="Prompt template in Go's language; @FILE reads it from a file.",
    ),
    click.option("--system", metavar=_TEXT, callback=_texts, help="System message, likewise."),
    click.option(
        "--license", metavar=_TEXT, multiple=True, callback=_texts, help="Licence, likewise; may be repeated."
    ),
    click.option(
        "--message",
        type=(click.Choice(ROLES), str),
        multiple=True,
        metavar="ROLE TEXT",
        help="A message that every chat begins with; may be repeated.",
    ),
    click.option("--renderer", help="Ollama's built-in renderer of prompts."),
    click.option("--parser", help="Ollama's built-in parser of answers."),
    click.option("--requires", metavar="VERSION", help="Oldest Ollama that the model works with."),
)


def setting_options(command: _Command) -> _Command:
    """Add the options that `settings_of` reads."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def settings_of(options: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    """Values by command, as `compose` takes them, of the options that say what else goes into the file."""
    parameters: dict[str, tuple[str, ...]] = options["parameters"]
    if DRAFT_NUM_PREDICT in parameters:
        raise click.UsageError(f"Give {DRAFT_NUM_PREDICT} as --draft-num-predict, not as --parameter.")
    if options["num_ctx"] is not None:
        if NUM_CTX in parameters:
            raise click.UsageError(f"{NUM_CTX} is given twice: as --num-ctx and as --parameter.")
        parameters = {**parameters, NUM_CTX: (str(options["num_ctx"]),)}
    single = {name: (options[name],) for name in ("renderer", "parser", "requires") if options[name] is not None}
    texts = {name: options[name] for name in ("template", "system", "license") if options[name]}
    messages = tuple(f"{role}: {text}" for role, text in options["message"])
    return {**parameters, **texts, **single, **({"message": messages} if messages else {})}
