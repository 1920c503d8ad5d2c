"""Which reader understands which architecture name of config.json."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dflash2.converter.config import DrafterConfig
from dflash2.converter.fields import Fields, load_json_object
from dflash2.converter.zlab import read_zlab
from dflash2.errors import CheckpointError, UnsupportedCheckpointError

Reader = Callable[[Fields, str], DrafterConfig]

READERS: dict[str, Reader] = {
    "DFlashDraftModel": read_zlab,
    "DFlash2DraftModel": read_zlab,
}
# Another method under a similar name: a Markov head on a DFlash backbone.
_DSPARK = "DSpark"


def read_config(folder: Path) -> DrafterConfig:
    """Read `folder`/config.json with the reader of its dialect.

    Raises CheckpointError if it cannot be read or a key is missing, UnsupportedCheckpointError if it asks for
    something that a GGUF drafter cannot express.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; give the folder with config.json and the safetensors files.")
    path = folder / "config.json"
    fields = Fields(path, (load_json_object(path),))
    architecture = _architecture(fields)
    if _DSPARK in architecture:
        raise UnsupportedCheckpointError(
            f"{path}: {architecture} is a DSpark drafter, another method; use upstream's draft-dspark."
        )
    reader = READERS.get(architecture)
    if reader is None:
        raise UnsupportedCheckpointError(
            f"{path}: architecture {architecture!r} is not supported; known are {', '.join(READERS)}."
        )
    return reader(fields, architecture)


def _architecture(fields: Fields) -> str:
    names = fields.get("architectures")
    if names is None:
        raise fields.wrong("architectures", "is missing; a drafter's config.json names its architecture there")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise fields.wrong("architectures", "is not a list of one name")
    return names[0]
