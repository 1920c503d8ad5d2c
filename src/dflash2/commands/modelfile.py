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
from dflash2.commands.settings import setting_options, settings_of
from dflash2.commands.terminal import FILE, HELP, errors, progress_display
from dflash2.errors import GGUFError, ModelfileError, OutputError
from dflash2.gguf_info import is_gguf
from dflash2.modelfiles import (
    DRAFT_NUM_PREDICT,
    DRAFT_QUANTIZATIONS,
    OLD_LLAMA_CPP,
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

_QUANTIZATIONS = "; ".join(f"{route}: {', '.join(types)}" for route, types in DRAFT_QUANTIZATIONS.items())


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
@setting_options
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
    settings = settings_of(options)
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
