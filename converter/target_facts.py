"""The target as every other module sees it, wherever it was read from."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from dflash2.converter.entry import Entry


@dataclass(frozen=True)
class Target:
    """Facts of a target model.

    `label` names it in messages; `path` is the GGUF file or the folder. `architecture` is the GGUF name. `layers`
    leaves out its own multi-token-prediction layers. `tokenizer` are the keys below `tokenizer.`, without the mask
    token, which is the drafter's own; `tokens` the token texts in order of their ids.
    """

    label: str
    path: Path
    architecture: str
    hidden_size: int
    layers: int
    vocab_size: int
    uses_mrope: bool
    tokenizer: tuple[Entry, ...] = field(repr=False)
    tokens: tuple[str, ...] | None = field(default=None, repr=False)
