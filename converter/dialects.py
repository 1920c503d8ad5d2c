"""Which reader understands which architecture name of config.json."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dflash2.converter.config import DrafterConfig
from dflash2.converter.fields import Fields, load_json_object
from dflash2.converter.overrides import Overrides
from dflash2.converter.zlab import read_zlab, zlab_name
from dflash2.errors import CheckpointError, UnsupportedCheckpointError

Reader = Callable[[Fields, str, Overrides], DrafterConfig]


@dataclass(frozen=True)
class Dialect:
    """How one family of exports is read: `read` its config.json, `rename` gives a tensor its z-lab name."""

    read: Reader
    rename: Callable[[str], str]


_ZLAB = Dialect(read_zlab, zlab_name)

DIALECTS: dict[str, Dialect] = {
    "DFlashDraftModel": _ZLAB,
    "DFlash2DraftModel": _ZLAB,
}
# Another method under a similar name: a Markov head on a DFlash backbone.
_DSPARK = "DSpark"


def read_config(folder: Path, overrides: Overrides) -> tuple[Dialect, DrafterConfig]:
    """The dialect of `folder`/config.json, and what it says.

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
    dialect = DIALECTS.get(architecture)
    if dialect is None:
        raise UnsupportedCheckpointError(
            f"{path}: architecture {architecture!r} is not supported; known are {', '.join(DIALECTS)}."
        )
    return dialect, dialect.read(fields, architecture, overrides)


def _architecture(fields: Fields) -> str:
    names = fields.get("architectures")
    if names is None:
        raise fields.wrong("architectures", "is missing; a drafter's config.json names its architecture there")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise fields.wrong("architectures", "is not a list of one name")
    return names[0]
