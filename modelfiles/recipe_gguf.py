"""Engines on llama.cpp: both models as GGUF, which a drafter's checkpoint is converted to first."""

from __future__ import annotations

import re

from dflash2.constants import TAPPABLE_ARCHITECTURES
from dflash2.modelfiles.recipe_pair import ModelName, PairNames
from dflash2.modelfiles.recipe_steps import Run, run

# Pairs whose conversion needs a base of the rotary embedding, and the target as a GGUF file (mask embedding).
_TWO_BASES = frozenset({"mimo-v2.5-pro"})
_THETA = "THETA"
# Pairs whose drafters mix layers that are causal inside the block with layers that are not.
_MIXED = frozenset({"qwen3.5-4b", "qwen3.6-27b", "qwen3.6-35b-a3b", "gemma-4-31b-it"})


def obstacle(pair: PairNames) -> str | None:
    """Why llama.cpp cannot run this pair; None if nothing is known against it."""
    if pair.entry is not None:
        remote = pair.entry.key in _TWO_BASES and pair.target.gguf and not pair.target.local
        needs_file = "the drafter is converted with its target's GGUF file: give TARGET as a file" if remote else None
        return pair.entry.stock_obstacle or needs_file
    if pair.architecture is not None and pair.architecture not in TAPPABLE_ARCHITECTURES:
        return f"llama.cpp publishes no layer inputs for {pair.architecture} targets"
    if not pair.drafter.gguf and pair.target.gguf and not pair.target.local:
        return "the drafter is converted with its target's tokenizer: give TARGET as a GGUF file, or DRAFTER as GGUF"
    return None


def imported_obstacle(pair: PairNames) -> str | None:
    """The same for Ollama, which takes the drafter as a file on this disk, named in a Modelfile."""
    if pair.drafter.gguf and not pair.drafter.local:
        return "DRAFT names a file on this disk: download the GGUF file and give its path"
    return obstacle(pair)


def notes(pair: PairNames) -> tuple[str, ...]:
    """What is special about this pair on llama.cpp."""
    found = []
    if not pair.target.gguf and pair.published_gguf is None:
        file = _target_file(pair)
        found.append(f"{file} is your GGUF file of {pair.target.text}, in any quantisation; none is on record here.")
    if pair.entry is not None and pair.entry.key in _MIXED:
        found.append(
            "This drafter's sliding layers are causal inside the block and its full ones are not; stock llama.cpp "
            "treats both alike and accepts less, the patched one (`dflash2 build`) does not."
        )
    if pair.entry is not None and pair.entry.converts == "with-option":
        found.append(f"dflash2-convert needs {pair.entry.conversion}.")
    if pair.entry is not None and pair.entry.key in _TWO_BASES:
        found.append(
            f"{_THETA} stands for rope_theta or backbone_rotary_base of the drafter's config.json: convert with each, "
            "and keep the one that drafts better."
        )
    return tuple(found)


def served(pair: PairNames) -> tuple[tuple[Run, ...], tuple[str, str], tuple[str, str]]:
    """What has to be done before, and the two arguments of llama-server that name target and drafter."""
    if pair.published_gguf is not None:
        target, drafter = pair.published_gguf
        return (), ("-hf", target.text), ("-hfd", drafter.text)
    before, drafter_file = _drafter_file(pair)
    drafter_hub = pair.drafter.gguf and not pair.drafter.local
    target_hub = pair.target.gguf and not pair.target.local
    return (
        before,
        ("-hf", pair.target.text) if target_hub else ("-m", _target_file(pair)),
        ("-hfd", pair.drafter.text) if drafter_hub else ("-md", drafter_file),
    )


def imported(pair: PairNames) -> tuple[tuple[Run, ...], str, str]:
    """What has to be done before, and what a Modelfile calls target and drafter."""
    before, drafter = _drafter_file(pair)
    target = pair.published_gguf[0] if pair.published_gguf is not None else pair.target
    if target.gguf and not target.local:
        return before, f"hf.co/{target.text}", _relative(drafter)
    return before, _relative(_target_file(pair)), _relative(drafter)


def ollama_name(pair: PairNames) -> str:
    """A name for the model in Ollama: that of the target, and the method."""
    name = re.sub("[^a-z0-9._-]+", "-", pair.target.stem.lower()).strip("-._")
    name = re.sub("-dflash2?$", "", name)  # a repository that holds both models
    return f"{name or 'model'}-dflash{'2' if pair.method == 2 else ''}"


def _target_file(pair: PairNames) -> str:
    return pair.target.text if pair.target.gguf and pair.target.local else f"{pair.target.stem}.gguf"


def _drafter_file(pair: PairNames) -> tuple[tuple[Run, ...], str]:
    """The drafter's GGUF file, and its conversion where it is a checkpoint."""
    if pair.drafter.gguf:
        return (), pair.drafter.text
    output = f"dflash-{_without_prefix(pair.drafter)}.gguf"
    entry = pair.entry
    arguments = [("dflash2-convert", entry.key if entry else pair.drafter.text)]
    if entry is not None and entry.key in _TWO_BASES:
        arguments += [("--target", _target_file(pair)), ("--rope-theta", _THETA)]
    elif entry is None or pair.target.text != entry.target:
        arguments.append(("--target", pair.target.text))
    if entry is not None and entry.block_size is None:
        arguments.append(("--block-size", str(pair.block_size)))
    return (run(*arguments, ("-o", output)),), output


def _without_prefix(model: ModelName) -> str:
    return re.sub("^dflash-", "", model.stem)


def _relative(path: str) -> str:
    """`path` as Ollama does not take it for the name of a model."""
    return path if path.startswith(("/", "./", "../")) else f"./{path}"
