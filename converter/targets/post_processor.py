"""What a tokenizer's post-processor says of BOS and EOS.

The rule of upstream's converter (gguf-py/gguf/vocab.py of the pinned llama.cpp), which released gguf packages lack in
part: llama.cpp compares these flags of drafter and target before it drafts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class PostProcessing:
    """`added`: whether BOS and EOS are put around a text; `named`: special tokens that tokenizer_config.json omits."""

    added: dict[str, bool] = field(default_factory=dict)
    named: dict[str, str] = field(default_factory=dict)


def read_post_processor(tokenizer: Mapping[str, Any], config: Mapping[str, Any]) -> PostProcessing:
    """The part of a tokenizer.json that speaks of BOS and EOS, where `config` is its tokenizer_config.json.

    Raises whatever a part of another shape causes: TypeError, AttributeError.
    """
    found = PostProcessing()
    post = tokenizer.get("post_processor") or {}
    for processor in post.get("processors", [post]):
        kind = processor.get("type")
        if kind == "ByteLevel":
            found.added = {"bos": False, "eos": False} | found.added
        elif kind == "RobertaProcessing":
            found.added |= {"bos": True, "eos": True}
        elif kind == "TemplateProcessing" and len(processor.get("single", [])) > 1:
            _read_template(processor["single"], config, found)
    return found


def _read_template(parts: list[dict[str, Any]], config: Mapping[str, Any], found: PostProcessing) -> None:
    first, last = (part.get("SpecialToken", {}).get("id") for part in (parts[0], parts[-1]))
    if last:
        found.added["eos"] = True
    if not first:
        return
    cls = config.get("cls_token")
    known = [config.get("bos_token") or cls, cls]
    if config and first not in known:
        found.named |= {kind: first for kind, token in zip(("bos", "cls"), known, strict=True) if not token}
    found.added["bos"] = not config or first in known or bool(found.named)
