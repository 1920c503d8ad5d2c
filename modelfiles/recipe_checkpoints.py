"""Engines that read checkpoints: both models as Hub ids or folders with config.json and safetensors."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from dflash2.modelfiles.recipe_pair import ModelName, PairNames
from dflash2.modelfiles.recipe_steps import Run, run


def obstacle(pair: PairNames) -> str | None:
    """Why an engine that reads checkpoints cannot have this pair; None if it can."""
    for model in (pair.target, pair.drafter):
        if model.gguf:
            return f"it reads checkpoints, and {model.text} is GGUF; give the Hub id or the folder of the checkpoint"
    return None


def names(pair: PairNames) -> tuple[tuple[Run, ...], str, str]:
    """What has to be done before, and what target and drafter are then called: Hub ids wherever that is possible."""
    if pair.subfolder is None:
        return (), pair.target.text, pair.drafter.text
    return folders(pair)


def folders(pair: PairNames, inside: str = ".", *, fetch_drafter: bool = True) -> tuple[tuple[Run, ...], str, str]:
    """The same with both as folders; those from the Hub are downloaded into the folder `inside`.

    Without `fetch_drafter` the drafter keeps its Hub id where it has a repository of its own.
    """
    before, target = _folder(pair.target, inside)
    if pair.subfolder is not None:
        return before, target, f"{target}/{pair.subfolder}"
    if not fetch_drafter and not pair.drafter.local:
        return before, target, pair.drafter.text
    more, drafter = _folder(pair.drafter, inside)
    return before + more, target, drafter


def _folder(model: ModelName, inside: str) -> tuple[tuple[Run, ...], str]:
    if model.local:
        return (), str(Path(model.text).absolute())
    path = f"./{PurePosixPath(inside) / model.stem}"
    return (run(("hf", "download", model.text), ("--local-dir", path)),), path
