"""Which reader understands which config.json, and which drafters are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from dflash2.converter.config import DrafterConfig
from dflash2.converter.dialects.fields import Fields, load_json_object
from dflash2.converter.dialects.layout import Place, find_drafter
from dflash2.converter.dialects.mask_embedding import read_mask_embedding
from dflash2.converter.dialects.muse import muse_name, read_muse
from dflash2.converter.dialects.nemo import read_nemo
from dflash2.converter.dialects.overrides import Overrides
from dflash2.converter.dialects.speculators import read_speculators
from dflash2.converter.dialects.zlab import read_zlab, zlab_name
from dflash2.errors import UnsupportedCheckpointError

Reader = Callable[[Fields, str, Overrides], DrafterConfig]


@dataclass(frozen=True)
class Dialect:
    """How one family of exports is read: `read` its config.json, `rename` gives a tensor its z-lab name."""

    read: Reader
    rename: Callable[[str], str]


_ZLAB = Dialect(read_zlab, zlab_name)
_NEMO = Dialect(read_nemo, zlab_name)
_MUSE = Dialect(read_muse, muse_name)
_SPECULATORS = Dialect(read_speculators, zlab_name)

DIALECTS: dict[str, Dialect] = {
    "DFlashDraftModel": _ZLAB,
    "DFlash2DraftModel": _ZLAB,
    "MuseGlimmerAssistantModel": _MUSE,
    "Qwen3DFlashDraftModel": _NEMO,
    "Qwen3DFlash2DraftModel": _NEMO,
    "Qwen3DFlash2Model": _NEMO,
    "DFlashSpeculator": _SPECULATORS,
}
# By `speculators_model_type`, which goes before the architecture: its DFlash 2 has z-lab's name for it.
SPECULATORS: dict[str, Dialect] = {"dflash": _SPECULATORS, "dflash2": _SPECULATORS}

_ELSEWHERE = "draft with a DFlash or DFlash 2 drafter of the same target"
# Parts of an architecture's name, and why nothing with it is converted.
_REFUSED = {
    "DSpark": (
        "is a DSpark drafter, another method with a Markov head; convert it with upstream's converter and run it with"
        " upstream's draft-dspark"
    ),
    "Domino": f"is a Domino drafter, whose GRU head corrects the logits token by token; {_ELSEWHERE}",
    "Laguna": (
        "cannot be kept: its attention output gate (g_proj) and its norm of each tap before fc (aux_hidden_norms) have"
        f" no place in llama.cpp's dflash graph; {_ELSEWHERE}, or serve it with vLLM"
    ),
    "KimiK3": f"has latent attention (MLA), which llama.cpp's dflash graph lacks; {_ELSEWHERE}",
}
# Trainers put such heads on a DFlash architecture and name them in `projector_type`.
_PROJECTORS = {"domino": "Domino", "causal_v5": "Domino", "dspark": "DSpark"}


def locate(folder: Path) -> Place:
    """Where in `folder` a drafter's config.json and weights lie; raises CheckpointError if it is no folder."""
    return find_drafter(folder, _is_drafter)


def read_config(folder: Path, overrides: Overrides) -> tuple[Dialect, DrafterConfig]:
    """The dialect of the drafter in `folder`, and what its config.json says.

    Raises CheckpointError if it cannot be read or a key is missing, UnsupportedCheckpointError if it asks for
    something that a GGUF drafter cannot express.
    """
    place = locate(folder)
    fields = Fields(place.config, (load_json_object(place.config),))
    dialect, architecture = _dialect(fields)
    config = dialect.read(fields, architecture, overrides)
    vector = read_mask_embedding(place.weights, config.mask_token_id, config.hidden_size)
    return dialect, replace(config, mask_embedding=vector)


def _dialect(fields: Fields) -> tuple[Dialect, str]:
    architecture = _architecture(fields)
    kind = fields.text("speculators_model_type")
    for part, reason in _REFUSED.items():
        if part in architecture or (kind or "") == part.lower():
            raise UnsupportedCheckpointError(f"{fields.path}: {architecture} {reason}.")
    _refuse_projectors(fields)
    table, name, key = (DIALECTS, architecture, "architecture")
    if kind is not None:
        table, name, key = (SPECULATORS, kind, "'speculators_model_type'")
    dialect = table.get(name)
    if dialect is None:
        raise UnsupportedCheckpointError(
            f"{fields.path}: {key} {name!r} is not supported; known are {', '.join(table)}."
        )
    return dialect, architecture


def _refuse_projectors(fields: Fields) -> None:
    drafter = Fields(fields.path, (fields.section("dflash_config"), *fields.scopes))
    projector = drafter.text("projector_type")
    if projector is not None:
        method = _PROJECTORS.get(projector)
        reason = _REFUSED[method] if method else f"has a head that is not known; {_ELSEWHERE}"
        raise UnsupportedCheckpointError(f"{fields.path}: the drafter of 'projector_type' {projector!r} {reason}.")


def _is_drafter(architectures: object) -> bool:
    names = architectures if isinstance(architectures, list) else []
    parts = ("DFlash", "DSpark", "Domino")
    return any(isinstance(name, str) and (name in DIALECTS or any(part in name for part in parts)) for name in names)


def _architecture(fields: Fields) -> str:
    names = fields.get("architectures")
    if names is None:
        raise fields.wrong("architectures", "is missing; a drafter's config.json names its architecture there")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise fields.wrong("architectures", "is not a list of one name")
    return names[0]
