"""Options that the commands of evidence share: which prompts, and how the pair is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from dflash2.commands.terminal import FILE, THREADS
from dflash2.gguf_info import read_gguf_info

if TYPE_CHECKING:
    from dflash2.evidence import Prompt
    from dflash2.runtime import Depth

_Command = TypeVar("_Command", bound=Callable[..., Any])
_MOST_CONTEXT = 4096
_PATHS = ("output", "file", "also")  # options that name files: a result names the models alone

_PROMPTS = (
    click.option("--prompts", "file", type=FILE, help="Your own: .txt (one a line), .json or .jsonl."),
    click.option("--dataset", help="Of the Hub: owner/name, owner/name:split or owner/name:file."),
    click.option("--category", "categories", multiple=True, help="Built-in sets. Default: code maths chat prose json."),
    click.option("--limit", type=click.IntRange(min=1), help="Prompts taken of each set."),
    click.option("--chat/--no-chat", default=True, show_default=True, help="Use the target's chat template, if any."),
)
_PAIR = (
    click.option(
        "-c", "--ctx-size", type=click.IntRange(min=1, max=2**31 - 1), help="Default: as trained, 4096 at most."
    ),
    click.option("-t", "--threads", type=THREADS, default=None, help="Default: half the cores."),
    click.option("-ngl", "--gpu-layers", type=click.IntRange(min=-1, max=10_000), default=0, show_default=True),
    click.option("--cache-type", type=click.Choice(["f32", "f16", "bf16", "q8_0", "q4_0"]), help="Of both KV caches."),
)


def prompt_options(command: _Command) -> _Command:
    """The options that `chosen_prompts` reads, and --chat."""
    return _with(_PROMPTS, command)


def pair_options(command: _Command) -> _Command:
    """The options that `llama_options` reads."""
    return _with(_PAIR, command)


def _with(options: tuple[Callable[[_Command], _Command], ...], command: _Command) -> _Command:
    for option in reversed(options):
        command = option(command)
    return command


def chosen_prompts(options: dict[str, Any]) -> tuple[Prompt, ...]:
    """The prompts that the options name, the built-in sets if none."""
    from dflash2 import evidence

    most = options["limit"]
    found: tuple[Prompt, ...] = ()
    if options["file"]:
        found += evidence.file_prompts(options["file"], most=most)
    if options["dataset"]:
        found += evidence.dataset_prompts(options["dataset"], most=most)
    if options["categories"] or not found:
        found += evidence.builtin_prompts(options["categories"] or evidence.CATEGORIES, most=most)
    return found


def depths(_context: click.Context, _parameter: click.Parameter, given: tuple[str, ...]) -> tuple[Depth | None, ...]:
    """Numbers of draft tokens, "auto", and None for "most": as many as the block has."""
    for depth in given:
        if depth not in ("most", "auto") and not (depth.isdecimal() and int(depth) > 0):
            raise click.BadParameter(f"{depth!r} is neither a number of drafts nor most or auto.")
    return tuple(None if depth == "most" else "auto" if depth == "auto" else int(depth) for depth in given)


def llama_options(target: Path, options: dict[str, Any]) -> dict[str, Any]:
    """What `DFlashLlama` is given; raises GGUFError."""
    from gguf.constants import GGMLQuantizationType

    info = read_gguf_info(target)
    trained = info.integer(info.own("context_length")) or _MOST_CONTEXT
    threads = {"n_threads": options["threads"], "n_threads_batch": options["threads"]} if options["threads"] else {}
    kind = GGMLQuantizationType[options["cache_type"].upper()].value if options["cache_type"] else None
    return {
        "n_ctx": options["ctx_size"] or min(_MOST_CONTEXT, trained),
        "n_gpu_layers": options["gpu_layers"],
        **threads,
        **({} if kind is None else {"type_k": kind, "type_v": kind}),
    }


def save(
    command: str,
    options: dict[str, Any],
    *,
    engine: Mapping[str, Any],
    models: dict[str, Path],
    rows: Iterable[Mapping[str, Any]],
    summary: Mapping[str, Any],
) -> None:
    """Write a result into the file that --json names, if it does, with the options that decide its numbers.

    `models` are the files by role. Raises OutputError, and GGUFError for a file that changed meanwhile.
    """
    from dflash2 import evidence

    if options["output"] is None:
        return
    conditions = {name: value for name, value in options.items() if name not in _PATHS}
    result = evidence.Result(command, engine, evidence.model_files(**models), conditions, tuple(rows), summary)
    evidence.write_result(result, options["output"])
