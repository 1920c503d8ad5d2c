"""What a GGUF file is: a drafter with its cycle facts, or any other model with its basic ones."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from gguf.constants import LlamaFileType

from dflash2.constants import DRAFTER_ARCHITECTURE
from dflash2.converter.config import Attention, Convolution, Selector
from dflash2.gguf_info import GGUFInfo, TensorInfo, read_gguf_info

Row = tuple[str, str]

# Tensor that makes llama.cpp treat a drafter as DFlash 2.
_SELECTOR_TENSOR = "selector_hidden.weight"
_MISSING = "missing"


@dataclass(frozen=True)
class TypeUse:
    """How much of a file one tensor type takes."""

    type_name: str
    n_tensors: int
    n_bytes: int


@dataclass(frozen=True)
class RopeFacts:
    """Rope keys of a drafter GGUF; `sections` are set for M-RoPE targets."""

    theta: float | None
    scaling: str | None
    factor: float | None
    sections: tuple[int, ...]


@dataclass(frozen=True)
class DrafterFacts:
    """Cycle facts of a drafter GGUF; None where the file lacks the key.

    `taps` are GGUF layer ids (the layer whose input is read); `hf_taps` the ids of config.json, one lower.
    """

    version: int
    block_size: int | None
    mask_token_id: int | None
    taps: tuple[int, ...]
    attention: Attention
    convolution: Convolution | None
    selector: Selector | None
    rope: RopeFacts
    own_embeddings: bool

    @property
    def hf_taps(self) -> tuple[int, ...]:
        """Tap ids as the Hugging Face config counts them."""
        return tuple(tap - 1 for tap in self.taps)


@dataclass(frozen=True)
class Inspection:
    """One GGUF file: sizes are counts, `n_bytes` the file's size, `drafter` None unless it is a DFlash drafter."""

    path: Path
    n_bytes: int
    architecture: str
    name: str | None
    file_type: str | None
    layers: int | None
    hidden_size: int | None
    context_length: int | None
    vocab_size: int | None
    n_parameters: int
    types: tuple[TypeUse, ...]
    tensors: tuple[TensorInfo, ...] = field(repr=False)
    drafter: DrafterFacts | None = None

    def rows(self) -> tuple[Row, ...]:
        """(label, value) pairs, ready for a table."""
        drafter = tuple(_drafter_rows(self.drafter)) if self.drafter else ()
        return (
            ("file", str(self.path)),
            ("kind", self._kind()),
            ("name", self.name or _MISSING),
            ("layers", _count(self.layers)),
            ("hidden size", _count(self.hidden_size)),
            ("context", _count(self.context_length, "tokens")),
            ("vocabulary", _count(self.vocab_size, "tokens")),
            *drafter,
            ("parameters", f"{self.n_parameters:,}"),
            ("file type", self.file_type or _MISSING),
            *((f"stored as {use.type_name}", f"{use.n_tensors} tensors, {use.n_bytes:,} bytes") for use in self.types),
            ("file size", f"{self.n_bytes:,} bytes"),
        )

    def _kind(self) -> str:
        if self.drafter is None:
            return f"{self.architecture or 'unnamed'} model"
        return "DFlash 2 drafter" if self.drafter.version == 2 else "DFlash drafter (v1, no selector)"


def inspect(path: Path) -> Inspection:
    """Read the header of a GGUF file; raises GGUFError if it cannot be read."""
    info = read_gguf_info(Path(path))
    tokens = info.metadata.get("tokenizer.ggml.tokens")
    return Inspection(
        path=info.path,
        n_bytes=info.path.stat().st_size,
        architecture=info.architecture,
        name=_text(info, "general.name"),
        file_type=_file_type(info),
        layers=info.integer(info.own("block_count")),
        hidden_size=info.integer(info.own("embedding_length")),
        context_length=info.integer(info.own("context_length")),
        vocab_size=len(tokens) if isinstance(tokens, tuple) else None,
        n_parameters=sum(math.prod(tensor.shape) for tensor in info.tensors),
        types=_type_uses(info.tensors),
        tensors=info.tensors,
        drafter=_drafter_facts(info) if info.architecture == DRAFTER_ARCHITECTURE else None,
    )


def _drafter_facts(info: GGUFInfo) -> DrafterFacts:
    has_selector = _SELECTOR_TENSOR in info.tensor_names
    return DrafterFacts(
        version=2 if has_selector else 1,
        block_size=info.integer(info.own("block_size")),
        mask_token_id=info.integer("tokenizer.ggml.mask_token_id"),
        taps=_integers(info, "target_layers"),
        attention=_attention(info),
        convolution=Convolution(_number(info, "conv_kernel_size"), _number(info, "conv_group_size"))
        if has_selector
        else None,
        selector=Selector(_number(info, "selector_rank"), _number(info, "selector_top_k")) if has_selector else None,
        rope=RopeFacts(
            theta=_float(info, "rope.freq_base"),
            scaling=_text(info, info.own("rope.scaling.type")),
            factor=_float(info, "rope.scaling.factor"),
            sections=_integers(info, "rope.dimension_sections"),
        ),
        own_embeddings="token_embd.weight" in info.tensor_names,
    )


def _attention(info: GGUFInfo) -> Attention:
    """As the loader reads it: one flag, false if absent; our own key overrides it for sliding layers."""
    window = info.integer(info.own("attention.sliding_window")) or None
    pattern = info.metadata.get(info.own("attention.sliding_window_pattern"))
    layers = info.integer(info.own("block_count")) or 0
    causal = bool(info.metadata.get(info.own("attention.causal"), False))
    return Attention(
        sliding=tuple(bool(item) for item in pattern) if window and isinstance(pattern, tuple) else (False,) * layers,
        window=window,
        causal_full=causal,
        causal_sliding=bool(info.metadata.get(info.own("attention.causal_swa"), causal)),
    )


def _drafter_rows(facts: DrafterFacts) -> Iterator[Row]:
    yield "block size", _count(facts.block_size, "tokens")
    yield "mask token", _count(facts.mask_token_id)
    yield "taps (input of target layer)", _list(facts.taps)
    yield "taps (Hugging Face ids)", _list(facts.hf_taps)
    attention = facts.attention
    n_sliding = sum(attention.sliding)
    if n_sliding:
        yield (
            "sliding layers",
            f"{n_sliding}, window {attention.window} tokens, {_causality(attention.causal_sliding)}",
        )
    if n_sliding < len(attention.sliding):
        yield "full layers", f"{len(attention.sliding) - n_sliding}, {_causality(attention.causal_full)}"
    if facts.convolution:
        yield "convolution", f"{facts.convolution.taps} taps, groups of {facts.convolution.group} channels"
    if facts.selector:
        yield "selector", f"top {facts.selector.top_k}, rank {facts.selector.rank}"
    yield "rope", _rope_text(facts.rope)
    yield "embeddings and head", "its own" if facts.own_embeddings else "the target's"


def _rope_text(rope: RopeFacts) -> str:
    parts = [f"theta {rope.theta:g}" if rope.theta is not None else "theta missing"]
    if rope.scaling:
        parts.append(f"{rope.scaling} x{rope.factor:g}" if rope.factor is not None else rope.scaling)
    if rope.sections:
        parts.append(f"M-RoPE sections {_list(rope.sections)}")
    return ", ".join(parts)


def _type_uses(tensors: tuple[TensorInfo, ...]) -> tuple[TypeUse, ...]:
    """Types in order of the bytes they take, most first."""
    names = {tensor.type_name for tensor in tensors}
    uses = []
    for name in names:
        sizes = [tensor.n_bytes for tensor in tensors if tensor.type_name == name]
        uses.append(TypeUse(name, len(sizes), sum(sizes)))
    return tuple(sorted(uses, key=lambda use: (-use.n_bytes, use.type_name)))


def _file_type(info: GGUFInfo) -> str | None:
    number = info.integer("general.file_type")
    try:
        return None if number is None else LlamaFileType(number).name.split("_", 1)[1]
    except ValueError:
        return f"number {number}"


def _text(info: GGUFInfo, key: str) -> str | None:
    value = info.metadata.get(key)
    return value if isinstance(value, str) else None


def _float(info: GGUFInfo, suffix: str) -> float | None:
    value = info.metadata.get(info.own(suffix))
    return float(value) if isinstance(value, (int, float)) else None


def _number(info: GGUFInfo, suffix: str) -> int:
    return info.integer(info.own(suffix)) or 0


def _integers(info: GGUFInfo, suffix: str) -> tuple[int, ...]:
    value = info.metadata.get(info.own(suffix))
    return tuple(item for item in value if isinstance(item, int)) if isinstance(value, tuple) else ()


def _count(value: int | None, unit: str = "") -> str:
    return _MISSING if value is None else f"{value} {unit}".strip()


def _list(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values)) if values else _MISSING


def _causality(causal: bool) -> str:
    return "causal" if causal else "not causal"
