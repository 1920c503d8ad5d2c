"""What a launch command needs to know of a pair: how each model is named, and the drafter's block size.

Nothing is fetched: published pairs are in the converter's registry, local files are inspected, and of other models on
the Hub nothing is known but their names.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from dflash2 import converter, hub
from dflash2.converter import Inspection, RegistryEntry
from dflash2.errors import RecipeError
from dflash2.regular_file import exists

# The llama.cpp project's GGUF of a target and the owner's of its drafter, where both are known to be published.
_PUBLISHED_GGUF = {"qwen3.8-27b": ("ggml-org/Qwen3.8-27B-GGUF:Q4_K_M", "incoai/Qwen3.8-27B-DFlash2-GGUF:Q4_K_M")}
# Architectures of the targets whose published drafters are causal inside the block.
_CAUSAL_TARGETS = frozenset({"laguna"})
_GGUF_REPOSITORY = re.compile(r"(?P<repository>[^:]+-GGUF)(:[A-Za-z0-9_]+)?", re.IGNORECASE)


@dataclass(frozen=True)
class ModelName:
    """A model as an engine is told of it: `text` is a local path, or a Hub id (with `:QUANT` for a GGUF repository).

    `local` says that it is on this disk, `gguf` that it is a GGUF file or a repository of them.
    """

    text: str
    local: bool = False
    gguf: bool = False

    @property
    def stem(self) -> str:
        """Its own name: without owner, folder, quantisation and suffix."""
        name = Path(self.text).name if self.local else self.text.rsplit("/", 1)[-1].split(":")[0]
        return re.sub(r"([-.]gguf)+$", "", name, flags=re.IGNORECASE)


@dataclass(frozen=True)
class PairNames:
    """A target and its drafter by name.

    `block_size` counts tokens, the anchor included; 0 where nothing says and no engine asks. `method` is 1 for DFlash
    and 2 for DFlash 2, `architecture` the target's in GGUF; None where nothing says. `causal` says that every drafter
    layer is causal inside the block. `entry` is the published pair that the drafter belongs to, and `subfolder` where
    the drafter lies inside its repository. `published_gguf` names the pair's GGUF repositories.
    """

    target: ModelName
    drafter: ModelName
    block_size: int
    method: int | None = None
    architecture: str | None = None
    causal: bool = False
    entry: RegistryEntry | None = None
    subfolder: str | None = None
    published_gguf: tuple[ModelName, ModelName] | None = None


class PairNameError(RecipeError):
    """The names do not say a pair: one stands for no model, or nothing says the block size."""


def pair_names(
    target: str, drafter: str | None = None, *, block_size: int | None = None, counted: bool = True
) -> PairNames:
    """The pair that `target` and `drafter` name; without `drafter`, the published pair called `target`.

    Each may be a local path, a Hub id or a published pair's name. `block_size` goes before what is on record;
    an engine for which nothing is `counted` needs none.

    Raises:
        PairNameError: a name that is none of these, or a block size that is not known.
        RecipeError: a name that no command should carry, or two models that are no target and its drafter.
        GGUFError, CheckpointError: a local model that cannot be read.
    """
    if drafter is None:
        entry = converter.resolve(target)
        if entry is None:
            raise _unknown(target, "no published pair")
        names = _published(entry)
    else:
        names = _given(target, drafter)
    for model in (names.target, names.drafter):
        if not model.text.isprintable() or model.text.startswith("-"):
            raise RecipeError(f"{model.text!r} cannot stand in a command: rename it, or give another path to it.")
    block_size = names.block_size if block_size is None else block_size
    if not block_size and counted:
        raise PairNameError(f"nothing here says the block size of {names.drafter.text}; give --block-size N.")
    return replace(names, block_size=block_size)


def _published(entry: RegistryEntry) -> PairNames:
    shared = entry.target == entry.drafter
    gguf = _PUBLISHED_GGUF.get(entry.key)
    return PairNames(
        target=ModelName(entry.target),
        drafter=ModelName(entry.drafter),
        block_size=entry.block_size or 0,
        method=entry.method,
        architecture=entry.target_architecture,
        causal=entry.target_architecture in _CAUSAL_TARGETS,
        entry=entry,
        subfolder="dflash" if shared else None,
        published_gguf=gguf and (ModelName(gguf[0], gguf=True), ModelName(gguf[1], gguf=True)),
    )


def _given(target: str, drafter: str) -> PairNames:
    known = converter.resolve(drafter)
    names = _published(known) if known else _named_drafter(drafter)
    published = converter.resolve(target)
    model = ModelName(published.target) if published else _model(target)
    if known and model.text == known.target:
        return names
    architecture = names.architecture
    if model.local:
        architecture = _inspected_architecture(model) or architecture
    elif published:
        architecture = published.target_architecture
    if known and architecture != known.target_architecture:
        raise RecipeError(f"{known.drafter} drafts for {known.target}, and {target} is a {architecture} model.")
    return replace(names, target=model, architecture=architecture, published_gguf=None)


def _named_drafter(name: str) -> PairNames:
    model = _model(name)
    unread = PairNames(ModelName(""), model, 0)
    if not model.local:
        return unread
    found = converter.inspect(name)
    config = found.checkpoint and found.checkpoint.config
    if config:
        causal = config.attention.causal_full and config.attention.causal_sliding
        return replace(unread, block_size=config.block_size, method=2 if config.selector else 1, causal=causal)
    if found.drafter:
        return replace(unread, block_size=found.drafter.block_size or 0, method=found.drafter.version)
    if found.checkpoint is None:
        raise RecipeError(f"{name} is a {found.architecture} model and no DFlash drafter; give TARGET, then DRAFTER.")
    return unread


def _inspected_architecture(model: ModelName) -> str | None:
    found: Inspection = converter.inspect(model.text)
    if found.drafter is not None:
        raise RecipeError(f"{model.text} is a DFlash drafter, not its target; give TARGET, then DRAFTER.")
    return found.architecture if model.gguf else None


def _model(name: str) -> ModelName:
    if exists(Path(name)):
        return ModelName(name, local=True, gguf=Path(name).is_file())
    repository = _GGUF_REPOSITORY.fullmatch(name)
    if hub.is_repo_id(repository["repository"] if repository else name):
        return ModelName(name, gguf=repository is not None)
    raise _unknown(name, "no file or folder here, no Hub id (owner/name) and no published pair")


def _unknown(name: str, what: str) -> PairNameError:
    close = converter.close_names(name)
    hint = f"did you mean {' or '.join(close)}?" if close else "`dflash2 list` shows the pairs."
    return PairNameError(f"{name!r} is {what}; {hint}")
