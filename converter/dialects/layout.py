"""Where in a folder a drafter lies: exports put config.json and weights in folders of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dflash2.converter.dialects.fields import load_json_object
from dflash2.errors import CheckpointError
from dflash2.gguf_info import is_gguf

_CONFIG = "config.json"
# (folder of config.json, folder of the weights), below the folder that the user gave.
_PLACES = (
    (".", "."),
    ("dflash", "dflash"),  # MiMo: beside the target's own config.json
    ("model/consolidated", "model/consolidated"),  # NeMo AutoModel: a training step's folder
    ("consolidated", "consolidated"),
    ("model/.hf_metadata", "model"),  # the same, sharded only
    (".hf_metadata", "."),
)

# Indexes of shards, a mask's own embedding, what modelopt says of its quantisation.
_BESIDE = ("*.safetensors.index.json", "mask_embedding.pt", "hf_quant_config.json")


@dataclass(frozen=True)
class Place:
    """The config.json of a drafter and the folder with its weights."""

    config: Path
    weights: Path

    def beside_weights(self) -> tuple[Path, ...]:
        """Files that are read with the weights and hold none of them by themselves."""
        return tuple(path for pattern in _BESIDE for path in sorted(self.weights.glob(pattern)))


def refuse_gguf(path: Path) -> None:
    """Raise CheckpointError if `path` is no checkpoint but a GGUF file."""
    if is_gguf(path):
        raise CheckpointError(
            f"{path} is a GGUF file already; `dflash2 inspect` says what it is, `dflash2 upgrade` puts the metadata of"
            " a drafter right."
        )


def find_drafter(folder: Path, is_drafter: Callable[[object], bool]) -> Place:
    """The first place below `folder` whose config.json has `architectures` of a drafter, else the first that is there.

    `is_drafter` judges the raw value of `architectures`. Raises CheckpointError if there is no config.json.
    """
    refuse_gguf(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; give the folder with config.json and the safetensors files.")
    places = [Place(folder / config / _CONFIG, folder / weights) for config, weights in _PLACES]
    present = [place for place in places if place.config.is_file()]
    if len(present) > 1:
        for place in present:
            if is_drafter(load_json_object(place.config).get("architectures")):
                return place
    return (present or places)[0]
