"""What a checkpoint folder says about itself, whether or not it can be converted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import gguf

from dflash2.converter.checkpoint import read_tensors
from dflash2.converter.config import DrafterConfig
from dflash2.converter.dialects.fields import JsonObject, load_json_object
from dflash2.converter.dialects.overrides import NO_OVERRIDES, Overrides
from dflash2.converter.dialects.table import locate, read_config
from dflash2.converter.plan import plan_tensors
from dflash2.converter.quantized import open_quantized
from dflash2.converter.safetensors_file import StoredTensor
from dflash2.errors import CheckpointError

_QUANTIZATION = ("quantization_config", "compression_config")
_NAMES = ("quant_method", "quant_algo", "format")


@dataclass(frozen=True)
class CheckpointFacts:
    """A folder with config.json and safetensors files.

    `dialect` is the architecture that config.json names; `config` is None and `reason` says why where the folder
    cannot be converted; `quantization` names the method its weights are stored with, `license` is the model card's.
    """

    dialect: str | None
    config: DrafterConfig | None
    reason: str | None
    quantization: str | None
    license: str | None
    files: tuple[str, ...]
    tensors: tuple[StoredTensor, ...] = field(repr=False)

    @property
    def convertible(self) -> bool:
        """Whether `dflash2-convert` takes the folder, given the right target."""
        return self.reason is None


def read_checkpoint_facts(folder: Path, overrides: Overrides = NO_OVERRIDES) -> CheckpointFacts:
    """Facts of `folder`, with a user's `overrides`; raises CheckpointError if it has no readable config.json."""
    top = load_json_object(locate(folder).config)
    config, stored, reason = _as_converter(folder, overrides)
    tensors = tuple(stored.values())
    return CheckpointFacts(
        dialect=_dialect(top),
        config=config,
        reason=reason,
        quantization=_quantization(top),
        license=_license(folder),
        files=tuple(sorted({str(tensor.path.relative_to(folder)) for tensor in tensors})),
        tensors=tensors,
    )


def _as_converter(
    folder: Path, overrides: Overrides
) -> tuple[DrafterConfig | None, Mapping[str, StoredTensor], str | None]:
    """Config, tensors and the first reason against converting: what one step refuses, the others may still tell."""
    config: DrafterConfig | None = None
    rename: Callable[[str], str] = str
    stored: Mapping[str, StoredTensor] = {}
    reasons = []
    try:
        dialect, config = read_config(folder, overrides)
        rename = dialect.rename
    except CheckpointError as error:
        reasons.append(str(error))
    try:
        stored = read_tensors(folder, rename)
    except CheckpointError as error:
        reasons.append(str(error))
    if config is not None and stored:
        try:
            place = locate(folder)
            sources, _ = open_quantized(load_json_object(place.config), place.weights, stored)
            plan_tensors(folder, config, sources)
        except CheckpointError as error:
            reasons.append(str(error))
    return config, stored, reasons[0] if reasons else None


def _dialect(top: JsonObject) -> str | None:
    names = top.get("architectures")
    if isinstance(names, list) and names and isinstance(names[0], str):
        return names[0]
    method = top.get("speculators_model_type")
    return f"speculators {method}" if isinstance(method, str) else None


def _quantization(top: JsonObject) -> str | None:
    for key in _QUANTIZATION:
        section = top.get(key)
        if isinstance(section, dict) and section:
            named = [section[name] for name in _NAMES if isinstance(section.get(name), str)]
            return " ".join(dict.fromkeys(named)) or "unknown"
    return None


def _license(folder: Path) -> str | None:
    try:
        card = gguf.Metadata.load_model_card(folder)
    except Exception:  # whatever the YAML parser of gguf raises: an unreadable card names no licence
        return None
    for key in ("license_name", "license"):
        value = card.get(key)
        if isinstance(value, str) and value != "other":
            return value
    return None
