"""`dflash2 modelfile`."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from dflash2 import converter
from dflash2.commands.converter import finding_line
from dflash2.commands.pair import pair_options, ready_pair
from dflash2.commands.terminal import FILE, HELP, errors, progress_display
from dflash2.errors import GGUFError, ModelfileError, OutputError
from dflash2.gguf_info import is_gguf
from dflash2.modelfiles import (
    DRAFT_NUM_PREDICT,
    DRAFT_QUANTIZATIONS,
    NUM_CTX,
    OLD_LLAMA_CPP,
    ROLES,
    STOP,
    Modelfile,
    Pair,
    Route,
    check_draft_quantization,
    check_folders,
    check_settings,
    compose,
    create_arguments,
    left_behind,
    model_name,
    resolve_folders,
    route_notes,
    shell_lines,
)
from dflash2.text import printable
from dflash2.whole_file import replacing

_TEXT = "TEXT|@FILE"
_QUANTIZATIONS = "; ".join(f"{route}: {', '.join(types)}" for route, types in DRAFT_QUANTIZATIONS.items())


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


@click.command(context_settings=HELP)
@pair_options
@click.option("-o", "--output", type=FILE, help="Modelfile to write. Default: standard output.")
@click.option("--from-modelfile", type=FILE, metavar="FILE", help="Change this one, and keep all else that is in it.")
@click.option("--name", help="What Ollama is to call the model. Default: made of TARGET's name.")
@click.option(
    "--route",
    type=click.Choice(["gguf", "mlx"]),
    default="gguf",
    show_default=True,
    help="GGUF files, or folders of safetensors for Ollama's MLX engine.",
)
@click.option(
    "--draft-num-predict",
    type=click.IntRange(min=1),
    metavar="N",
    help="Tokens to draft per cycle. Default: all that the drafter's block has. Not on the mlx route.",
)
@click.option(
    "--draft-quantize",
    metavar="TYPE",
    help=f"Let Ollama quantise the drafter: {_QUANTIZATIONS}.",
)
@click.option("--num-ctx", type=click.IntRange(min=1), metavar="N", help="Tokens of context: PARAMETER num_ctx.")
@click.option(
    "--parameter",
    "parameters",
    metavar="NAME=VALUE",
    multiple=True,
    callback=_parameters,
    help="Any other PARAMETER; may be repeated.",
)
@click.option(
    "--template", metavar=_TEXT, callback=_texts, help="Prompt template in Go's language; @FILE reads it from a file."
)
@click.option("--system", metavar=_TEXT, callback=_texts, help="System message, likewise.")
@click.option("--license", metavar=_TEXT, multiple=True, callback=_texts, help="Licence, likewise; may be repeated.")
@click.option(
    "--message",
    type=(click.Choice(ROLES), str),
    multiple=True,
    metavar="ROLE TEXT",
    help="A message that every chat begins with; may be repeated.",
)
@click.option("--renderer", help="Ollama's built-in renderer of prompts.")
@click.option("--parser", help="Ollama's built-in parser of answers.")
@click.option("--requires", metavar="VERSION", help="Oldest Ollama that the model works with.")
def modelfile(
    target: str,
    drafter: str | None,
    output: Path | None,
    from_modelfile: Path | None,
    name: str | None,
    route: Route,
    draft_num_predict: int | None,
    draft_quantize: str | None,
    **options: Any,
) -> None:
    """Write an Ollama Modelfile for TARGET and DRAFTER, and say which `ollama create` goes with it.

    TARGET is a GGUF file, a Hub id of GGUF files (owner/name or owner/name:QUANT), or the name of a published pair,
    which names its drafter too. DRAFTER is a GGUF file, a checkpoint folder or a Hub id; checkpoints are converted.
    """
    settings = _settings(options)
    check_settings(settings)
    base = None if from_modelfile is None else _existing(from_modelfile)
    _check_output(output)
    pair_choices = {key: options[key] for key in ("revision", "drafter_revision", "offline", "outtype", "no_check")}
    if route == "mlx":
        if draft_num_predict is not None:
            raise click.UsageError("--draft-num-predict has no effect on the mlx route; leave it out.")
        ready = _folders(target, drafter, options)
    else:
        ready = _files(ready_pair(target, drafter, **pair_choices), draft_num_predict)
    if draft_quantize is not None:
        draft_quantize = check_draft_quantization(route, draft_quantize, ready.stored)
    if ready.drafted is not None:
        settings = {DRAFT_NUM_PREDICT: (str(ready.drafted),), **settings}
    written = compose(ready.target, ready.drafter, settings, base)
    if output is None:
        # A terminal must not be steered by what an existing Modelfile holds.
        click.echo(printable(written.decode("utf-8", "replace")) if sys.stdout.isatty() else written, nl=False)
    else:
        with replacing(output) as temporary:
            temporary.write_bytes(written)
    arguments = create_arguments(name or model_name(ready.label), str(output or "Modelfile"), route, draft_quantize)
    for line in shell_lines(arguments, windows=os.name == "nt"):
        errors.print(line, markup=False, soft_wrap=True)
    made = Modelfile.parse(written)
    for note in (*ready.notes, *route_notes(route, made), *_moved(made, from_modelfile, output)):
        errors.print(f"note: {note}", style="yellow", markup=False, soft_wrap=True)


def _existing(path: Path) -> bytes:
    """The bytes of a Modelfile, which parses: that is found out before anything is fetched."""
    source = path.read_bytes()
    try:
        Modelfile.parse(source)
    except ModelfileError as error:
        raise ModelfileError(f"{path}: {error}") from error
    return source


def _check_output(output: Path | None) -> None:
    """Refuse before anything is fetched what cannot be written, and to write over a model."""
    if output is not None and not output.absolute().parent.is_dir():
        raise OutputError(f"Cannot write {output}: the folder {output.parent} does not exist; create it.")
    if output is not None and is_gguf(output):
        raise OutputError(f"Cannot write {output}: it is a GGUF file; give the path of the Modelfile to write.")


def _moved(made: Modelfile, source: Path | None, output: Path | None) -> tuple[str, ...]:
    if source is None or (output is not None and output.resolve().parent == source.resolve().parent):
        return ()
    return tuple(
        f"{path} is relative to {source.parent}: save the Modelfile there, or write the whole path"
        for path in left_behind(made, source.parent)
    )


@dataclass(frozen=True)
class _Ready:
    """What a route has to offer: `stored` is the drafter's type, `drafted` how many tokens Ollama is to draft."""

    target: Path
    drafter: Path
    label: str
    stored: str | None = None
    drafted: int | None = None
    notes: tuple[str, ...] = ()


def _files(pair: Pair, drafted: int | None) -> _Ready:
    if pair.target.n_parts > 1:
        raise GGUFError(
            f"{pair.target.path} is the first of {pair.target.n_parts} files, and a Modelfile names one; join them with"
            " llama-gguf-split --merge and give the result."
        )
    if drafted is not None and drafted >= pair.block_size:
        raise click.UsageError(f"--draft-num-predict {drafted}: this drafter drafts at most {pair.block_size - 1}.")
    found = converter.inspect(pair.drafter.path)
    version = found.drafter.version if found.drafter else 1
    return _Ready(
        pair.target.real_path,
        pair.drafter.real_path,
        pair.target.label,
        found.file_type,
        drafted or pair.block_size - 1,
        (OLD_LLAMA_CPP,) if version == 2 else (),
    )


def _folders(target: str, drafter: str | None, options: dict[str, Any]) -> _Ready:
    where = {key: options[key] for key in ("revision", "drafter_revision", "offline")}
    with progress_display() as progress:
        pair = resolve_folders(target, drafter, **where, progress=progress)
    for finding in check_folders(pair, warn_only=options["no_check"]).problems:
        errors.print(finding_line(finding), style="yellow", markup=False, soft_wrap=True)
    return _Ready(pair.target, pair.drafter, target)


def _settings(options: dict[str, Any]) -> dict[str, tuple[str, ...]]:
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
