"""A target read from its Hugging Face folder: only config.json and the tokenizer files are looked at."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dflash2.constants import EXPERT_ARCHITECTURES, HF_ARCHITECTURES, MROPE_ARCHITECTURES
from dflash2.converter.dialects.fields import Fields, JsonObject, load_json_object
from dflash2.converter.targets.facts import TOKENS, Target
from dflash2.converter.targets.hf_tokenizer import read_tokenizer
from dflash2.errors import CheckpointError, UnsupportedCheckpointError

# Where configs of multimodal models keep that of the language model.
_TEXT_CONFIGS = ("text_config", "llm_config", "lm_config", "language_config")
_ROPES = ("rope_parameters", "rope_scaling")
_SECTIONS = ("mrope_section", "xdrope_section")
_DRAFTERS = ("DFlash", "DSpark", "MuseGlimmerAssistant")


def read_hf_target(folder: Path, label: str) -> Target:
    """Read the target in `folder`.

    Raises CheckpointError if a file is missing or damaged, UnsupportedCheckpointError if its architecture or its kind
    of tokenizer is not known; both say what to give instead.
    """
    path = folder / "config.json"
    if not path.is_file():
        found = next(iter(sorted(folder.glob("*.gguf"))), None)
        hint = f"give the path of its GGUF file, {found}" if found else "give the folder or the GGUF of the target"
        raise CheckpointError(f"{folder} has no config.json; {hint}.")
    config = load_json_object(path)
    scopes = tuple(_scopes(config))
    fields = Fields(path, scopes)
    architecture = _architecture(path, config, fields)
    tokenizer = read_tokenizer(folder, architecture, fields)
    tokens = next(entry.value for entry in tokenizer if entry.key == TOKENS)
    assert isinstance(tokens, tuple)
    return Target(
        label=label,
        path=folder,
        architecture=architecture,
        hidden_size=_size(fields, "hidden_size"),
        layers=_size(fields, "num_hidden_layers"),
        vocab_size=len(tokens),
        uses_mrope=architecture in MROPE_ARCHITECTURES or _spells_out_sections(scopes),
        tokenizer=tokenizer,
    )


def _scopes(config: JsonObject) -> Iterator[JsonObject]:
    """The language model's own config goes first."""
    for key in _TEXT_CONFIGS:
        if isinstance(config.get(key), dict):
            yield config[key]
    yield config


def _size(fields: Fields, key: str) -> int:
    value = fields.optional_integer(key)
    if value is None:
        raise fields.wrong(key, "is missing; give a GGUF of the target")
    return value


def _architecture(path: Path, config: JsonObject, fields: Fields) -> str:
    """GGUF name. Some name a class in the language model's own config, others (Kimi K3) an older one's."""
    names = [*_class_names(config), *_class_names({"architectures": fields.get("architectures")})]
    if any(name.startswith(_DRAFTERS) for name in names):
        raise CheckpointError(
            f"{path.parent} is a drafter itself; give the folder or the GGUF of the model it drafts for."
        )
    for name in names:
        if name in HF_ARCHITECTURES:
            found = HF_ARCHITECTURES[name]
            return EXPERT_ARCHITECTURES.get(found, found) if fields.get("num_experts_per_tok") else found
    named = names[0] if names else "none"
    raise UnsupportedCheckpointError(
        f"{path}: the target's architecture ({named}) is not known here; give a GGUF of the target."
    )


def _class_names(config: JsonObject) -> list[str]:
    names: Any = config.get("architectures")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _spells_out_sections(scopes: tuple[JsonObject, ...]) -> bool:
    ropes = [scope.get(key) for scope in scopes for key in _ROPES]
    holders = [*scopes, *(rope for rope in ropes if isinstance(rope, dict))]
    return any(holder.get(key) for holder in holders for key in _SECTIONS)
