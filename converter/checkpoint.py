"""The tensors of a checkpoint folder: which files belong to it, and one canonical name for each tensor."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dflash2.converter.dialects.fields import load_json_object
from dflash2.converter.dialects.table import locate
from dflash2.converter.safetensors_file import StoredTensor, read_safetensors
from dflash2.errors import CheckpointError

_INDEX = "model.safetensors.index.json"
_SHARD_NUMBER = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")
# Distributed checkpoints name the writer too, and any writer's file fills the place.
_WRITER = re.compile(r"shard-\d{5}-(?=.+-\d{5}-of-\d{5}\.safetensors)")
_PICKLES = ("*.bin", "*.pt", "*.pth")


def read_tensors(folder: Path, rename: Callable[[str], str]) -> Mapping[str, StoredTensor]:
    """All tensors of the drafter in `folder` (see `dialects.locate`) by the name that `rename` gives them.

    Raises CheckpointError for a missing shard, a tensor that appears twice, or files that disagree with the index.
    """
    folder = locate(folder).weights
    index = _find_index(folder)
    files = _indexed_files(folder, index) if index else _listed_files(folder)
    stored = [tensor for file in files for tensor in read_safetensors(file)]
    if index:
        _check_against_index(index, stored)
    tensors: dict[str, StoredTensor] = {}
    for tensor in stored:
        name = rename(tensor.name)
        if name in tensors:
            other = tensors[name]
            raise CheckpointError(
                f"{folder}: tensor {name!r} appears twice, in {other.path.name} and in {tensor.path.name};"
                " remove the file that does not belong."
            )
        tensors[name] = tensor
    return tensors


def _find_index(folder: Path) -> Path | None:
    found = sorted(folder.glob("*.safetensors.index.json"))
    if len(found) > 1 and folder / _INDEX in found:
        return folder / _INDEX
    if len(found) > 1:
        raise CheckpointError(f"{folder} has {len(found)} index files and none is {_INDEX}; keep one.")
    return found[0] if found else None


def _weight_map(index: Path) -> dict[str, Any]:
    weight_map = load_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no 'weight_map'; download it again.")
    return weight_map


def _indexed_files(folder: Path, index: Path) -> list[Path]:
    names = _weight_map(index).values()
    for name in names:
        # A file name only: an index must not lead out of the folder.
        if not isinstance(name, str) or Path(name).name != name or "\\" in name or not name.endswith(".safetensors"):
            raise CheckpointError(f"{index} names {name!r}, which is not a safetensors file of the folder.")
    files = [folder / name for name in sorted(set(names))]
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{folder} lacks the shard {file.name} named in {index.name}; download it.")
    return files


def _listed_files(folder: Path) -> list[Path]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickled = next((file for pattern in _PICKLES for file in sorted(folder.glob(pattern))), None)
        hint = f"; {pickled.name} is a pickle, which is never loaded, save it as safetensors" if pickled else ""
        raise CheckpointError(f"{folder} has no .safetensors file{hint}.")
    present = {_WRITER.sub("", file.name) for file in files}
    for name in sorted(present):
        if match := _SHARD_NUMBER.fullmatch(name):
            for number in range(1, int(match["count"]) + 1):
                wanted = f"{match['stem']}-{number:05d}-of-{match['count']}.safetensors"
                if wanted not in present:
                    raise CheckpointError(f"{folder} lacks the shard {wanted}; download it.")
    return files


def _check_against_index(index: Path, stored: list[StoredTensor]) -> None:
    weight_map = _weight_map(index)
    held = {tensor.name: tensor.path.name for tensor in stored}
    for name, file in weight_map.items():
        if held.get(name) != file:
            raise CheckpointError(
                f"{index} says that {file} holds the tensor {name!r}, but it does not; download both."
            )
    for name, file in held.items():
        if name not in weight_map:
            raise CheckpointError(f"{index} does not name the tensor {name!r} of {file}; download both again.")
