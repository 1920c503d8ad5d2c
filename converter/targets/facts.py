"""The target as every other module sees it, wherever it was read from."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from dflash2.converter.entry import Entry

TOKENS = "tokenizer.ggml.tokens"


@dataclass(frozen=True)
class Target:
    """Facts of a target model.

    `label` names it in messages; `path` is the GGUF file or the folder. `architecture` is the GGUF name. `layers`
    leaves out its own multi-token-prediction layers. `tokenizer` are the keys below `tokenizer.`, without the mask
    token, which is the drafter's own.
    """

    label: str
    path: Path
    architecture: str
    hidden_size: int
    layers: int
    vocab_size: int
    uses_mrope: bool
    tokenizer: tuple[Entry, ...] = field(repr=False)

    @cached_property
    def tokens(self) -> tuple[str, ...]:
        """Token texts in order of their ids; decoded on first use, as few conversions look at them."""
        texts = next(entry.decoded() for entry in self.tokenizer if entry.key == TOKENS)
        assert isinstance(texts, tuple)
        return tuple(map(str, texts))
