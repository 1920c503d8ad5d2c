"""A target read from its GGUF: sizes, kind of rope, and the tokenizer exactly as it is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from dflash2.constants import DRAFTER_ARCHITECTURE
from dflash2.converter.entry import STRINGS, Entry
from dflash2.converter.targets.facts import TOKENS, Target
from dflash2.errors import GGUFError
from dflash2.gguf_info import GGUFInfo, read_gguf_info

_TOKENIZER = "tokenizer."
_MASK_TOKEN = "tokenizer.ggml.mask_token_id"
_PART = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})\.gguf")


def read_gguf_target(path: Path, label: str) -> Target:
    """Read a target GGUF; of a split one the first file is enough. Raises GGUFError if it cannot serve as a target."""
    info = read_gguf_info(path)
    if info.architecture == DRAFTER_ARCHITECTURE:
        raise GGUFError(f"{path} is a drafter itself; give the GGUF of the model it drafts for.")
    _require_first_part(info)
    if info.value_types.get(TOKENS) != STRINGS:
        raise GGUFError(f"{path} has no tokenizer ({TOKENS}); give a GGUF of a whole language model.")
    return Target(
        label=label,
        path=path,
        architecture=info.architecture,
        hidden_size=_required(info, "embedding_length"),
        layers=_required(info, "block_count") - (info.integer(info.own("nextn_predict_layers")) or 0),
        vocab_size=info.length(TOKENS) or 0,
        uses_mrope=info.own("rope.dimension_sections") in info.metadata,
        tokenizer=tuple(_tokenizer(info)),
    )


def parts_of(path: Path) -> tuple[Path, ...]:
    """`path` and, if its name is that of one part of a split GGUF, the other parts that are there."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return (path,)
    others = path.parent.glob(f"*-of-{match['count']}{path.suffix}")
    return (path, *(other for other in others if _is_part(other.name, match["stem"])))


def _is_part(name: str, stem: str) -> bool:
    match = _PART.fullmatch(name)
    return match is not None and match["stem"] == stem


def _require_first_part(info: GGUFInfo) -> None:
    number = info.integer("split.no")
    if not number:
        return
    first = "the file that ends in -00001-of-....gguf"
    if match := _PART.fullmatch(info.path.name):
        first = str(info.path.with_name(f"{match['stem']}-00001-of-{match['count']}.gguf"))
    raise GGUFError(f"{info.path} is part {number + 1} of a split GGUF; give the first part, {first}.")


def _required(info: GGUFInfo, suffix: str) -> int:
    value = info.integer(info.own(suffix))
    if value is None:
        raise GGUFError(f"{info.path} has no {info.own(suffix)!r}; give a GGUF of a whole language model.")
    return value


def _tokenizer(info: GGUFInfo) -> Iterator[Entry]:
    """Arrays are copied as bytes: vocabularies have hundreds of thousands of texts."""
    for key, kind in info.value_types.items():
        if not key.startswith(_TOKENIZER) or key == _MASK_TOKEN:
            continue
        if kind.element is None:
            yield Entry(key, info.metadata[key], kind)
        else:
            yield Entry(key, (), kind, info.encoded(key))
