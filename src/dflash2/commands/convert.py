"""`dflash2 convert`, also `dflash2-convert`."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import click

from dflash2 import converter, hub
from dflash2.commands.terminal import FILE, HELP, console, errors, progress_display
from dflash2.constants import MAX_BLOCK_SIZE, MIN_BLOCK_SIZE
from dflash2.converter import OUT_TYPES, DraftVocabulary, Overrides, TapIds, VocabularyMap
from dflash2.regular_file import exists


def _pairs(_context: click.Context, _option: click.Parameter, given: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """PATTERN=TYPE as pairs; a usage error if there is no equals sign."""
    pairs = []
    for text in given:
        pattern, _, type_name = text.rpartition("=")
        if not pattern:
            raise click.BadParameter(f"{text!r} is not PATTERN=TYPE, as 'fc=q8_0'.")
        pairs.append((pattern, type_name))
    return tuple(pairs)


@click.command(context_settings=HELP)
@click.argument("drafter")
@click.option(
    "--target",
    metavar="TARGET",
    help="The model it drafts for: its GGUF, folder, Hub id or pair's name; needed unless DRAFTER is a published pair.",
)
@click.option("-o", "--output", type=FILE, help="GGUF file to write. Default: dflash-NAME-TYPE.gguf in this folder.")
@click.option("--revision", help="Branch, tag or commit of DRAFTER on the Hub.")
@click.option("--target-revision", help="The same of TARGET.")
@click.option("--offline", is_flag=True, help="Take what is on the Hub from the cache alone.")
@click.option(
    "--outtype",
    metavar=f"[{'|'.join(OUT_TYPES)}]",
    default="bf16",
    show_default=True,
    help="Type of the matrices; all but f32, f16, bf16 and q8_0 go through llama.cpp's quantiser.",
)
@click.option(
    "--tensor-type",
    "tensor_types",
    metavar="PATTERN=TYPE",
    callback=_pairs,
    multiple=True,
    help="Type of the matrices in whose GGUF name PATTERN is found, as 'fc=q8_0' or 'ffn_(up|gate)=q4_k'; repeatable.",
)
@click.option(
    "--block-size",
    type=click.IntRange(MIN_BLOCK_SIZE, MAX_BLOCK_SIZE),
    help="Tokens per block, where the checkpoint names none.",
)
@click.option("--mask-token-id", type=click.IntRange(min=0), help="The drafter's mask token, likewise.")
@click.option(
    "--sliding-window",
    type=click.Choice(["on", "off"]),
    help="Keep or drop the window of sliding layers, against 'use_sliding_window' of config.json.",
)
@click.option(
    "--tap-ids",
    type=click.Choice(["outputs", "inputs"]),
    help="Whether the checkpoint's tap ids name layers by their output or by their input, where it may be either.",
)
@click.option(
    "--rope-theta",
    type=click.FloatRange(min=0, min_open=True),
    help="Base of the drafter's rotary embedding, where the checkpoint names two.",
)
@click.option(
    "--d2t",
    type=click.Choice(["offsets", "absolute"]),
    help="Whether the map of a reduced vocabulary holds token ids minus their row, or as they are.",
)
@click.option(
    "--embed-target-head",
    is_flag=True,
    help="Carry the target's embeddings and head: for a drafter on a device that the target does not use.",
)
@click.option(
    "--draft-vocab",
    type=click.IntRange(min=1),
    metavar="N",
    help="Carry a head of the N most frequent tokens alone: cheaper drafts, the same output.",
)
@click.option(
    "--draft-vocab-from",
    type=FILE,
    multiple=True,
    metavar="FILE",
    help="Where to count them: lines TOKEN_ID COUNT, JSON {id: count}, or any text. May be repeated.",
)
def convert(
    drafter: str,
    target: str | None,
    output: Path | None,
    revision: str | None,
    target_revision: str | None,
    offline: bool,
    outtype: str,
    tensor_types: tuple[tuple[str, str], ...],
    block_size: int | None,
    mask_token_id: int | None,
    sliding_window: str | None,
    tap_ids: TapIds | None,
    rope_theta: float | None,
    d2t: VocabularyMap | None,
    embed_target_head: bool,
    draft_vocab: int | None,
    draft_vocab_from: tuple[Path, ...],
) -> None:
    """Convert the drafter checkpoint DRAFTER to GGUF.

    DRAFTER is a folder with config.json and safetensors files, a Hub id (owner/name), or the name of a published
    pair (`dflash2 list`), which names its target too. Of a target on the Hub no weights are fetched.
    """
    if (draft_vocab is None) != (not draft_vocab_from):
        raise click.UsageError("--draft-vocab N and --draft-vocab-from FILE belong together; give both.")
    overrides = Overrides(
        block_size=block_size,
        mask_token_id=mask_token_id,
        sliding_window=None if sliding_window is None else sliding_window == "on",
        tap_ids=tap_ids,
        rope_theta=rope_theta,
        d2t=d2t,
    )
    known = converter.resolve(drafter)
    name = known.drafter if known else drafter
    converter.refuse_gguf(Path(drafter))
    if known is None and drafter and not exists(Path(drafter)) and not hub.is_repo_id(drafter):
        raise click.UsageError(_unknown(drafter, "no folder"))
    target = (known.target if known else None) if target is None else _target(target)
    if target is None:
        raise click.UsageError(f"--target is needed: {drafter!r} is no published pair that names its target.")
    with progress_display() as progress:
        drafter_files = hub.resolve_drafter(
            name, revision=revision, offline=offline, progress=partial(progress, "fetching the drafter")
        )
        target_files = hub.resolve_target(
            target,
            revision=target_revision,
            offline=offline,
            progress=partial(progress, "fetching the target's tokenizer"),
        )
        done = converter.convert(
            drafter_files,
            target_files,
            output or Path(_default_name(name, outtype)),
            outtype=outtype,
            tensor_types=tensor_types,
            overrides=overrides,
            embed_target_head=embed_target_head,
            draft_vocab=None if draft_vocab is None else DraftVocabulary(draft_vocab, draft_vocab_from),
            progress=partial(progress, "writing"),
        )
    console.print(
        f"{done.output}: {done.n_tensors} tensors, {done.n_parameters / 1e6:.1f} M parameters, "
        f"{done.n_bytes / 1e6:.1f} MB, {done.outtype}",
        markup=False,
        soft_wrap=True,
    )
    for note in done.notes:
        errors.print(f"note: {note}", style="yellow", markup=False, soft_wrap=True)


def _default_name(drafter: str, outtype: str) -> str:
    """`dflash-NAME-TYPE.gguf`: llama-server finds drafters beside a target by the first word."""
    stem = re.sub("^dflash-", "", Path(drafter).resolve().name if exists(Path(drafter)) else drafter.rsplit("/", 1)[-1])
    return f"dflash-{stem}-{outtype.upper()}.gguf"


def _target(name: str) -> str:
    """The target that `name` stands for: that of a pair if it names one; a usage error if it is nothing known."""
    if exists(Path(name)) or hub.is_repo_id(name):
        return name
    known = converter.resolve(name)
    if known is None:
        raise click.UsageError(_unknown(name, "no GGUF file, no folder"))
    return known.target


def _unknown(name: str, paths: str) -> str:
    """What to say of a DRAFTER or TARGET that is nothing known."""
    close = " or ".join(converter.close_names(name))
    hint = f"did you mean {close}?" if close else "`dflash2 list` shows the pairs."
    return f"{name!r} is {paths}, no Hub id (owner/name) and no published pair; {hint}"
