"""The model card (README.md) of a checkpoint folder: its front matter, and the licence in it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import gguf

from dflash2.errors import CheckpointError
from dflash2.text import HALF_CHARACTER, NOT_TEXT

CARD = "README.md"
_OWN_TERMS = "other"


def read_card(folder: Path) -> Mapping[str, object]:
    """Strings and lists of strings of the card's front matter (its YAML may hold anything); empty without a card.

    Raises CheckpointError if it cannot be read.
    """
    try:
        card = gguf.Metadata.load_model_card(folder)
    except Exception as error:  # whatever the YAML parser of gguf raises
        raise CheckpointError(f"{folder / CARD} has no readable model card; correct or remove it.") from error
    texts = {
        key: value
        for key, value in card.items()
        if isinstance(value, str) or (isinstance(value, list) and all(isinstance(item, str) for item in value))
    }
    for key, value in texts.items():
        if any(map(HALF_CHARACTER.search, [value] if isinstance(value, str) else value)):
            raise CheckpointError(f"{folder / CARD}: {key!r} {NOT_TEXT}")
    return texts


def license_of(card: Mapping[str, object]) -> str | None:
    """The licence identifier; the card's own name for one it calls "other". None if it has none."""
    found = card.get("license")
    if isinstance(found, list):
        return ", ".join(map(str, found)) or None
    if found == _OWN_TERMS and isinstance(card.get("license_name"), str):
        found = card["license_name"]
    return found if isinstance(found, str) else None
