"""An inspection as rows of a table: one label and one readable value each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from dflash2.converter.checking.checkpoint_facts import CheckpointFacts
from dflash2.converter.checking.drafter_facts import DrafterFacts, RopeFacts
from dflash2.converter.config import Attention, Convolution, DrafterConfig, Selector

if TYPE_CHECKING:
    from dflash2.converter.checking.inspection import Inspection

Row = tuple[str, str]

_MISSING = "missing"


def rows_of(seen: Inspection) -> tuple[Row, ...]:
    """(label, value) pairs, ready for a table."""
    return tuple(_rows(seen))


def _rows(seen: Inspection) -> Iterator[Row]:
    yield "folder" if seen.checkpoint else "file", str(seen.path)
    yield "kind", _kind(seen)
    if seen.shard:
        yield "part", f"{seen.shard.number} of {seen.shard.count}"
    yield "name", seen.name or _MISSING
    if seen.license:
        yield "licence", seen.license
    yield "layers", _count(seen.layers)
    yield "hidden size", _count(seen.hidden_size)
    yield "context", _count(seen.context_length, "tokens")
    yield "vocabulary", _count(seen.vocab_size, "tokens")
    if seen.drafter:
        yield from _drafter_rows(seen.drafter)
    if seen.checkpoint:
        yield from _checkpoint_rows(seen.checkpoint)
    yield "parameters", f"{seen.n_parameters:,}"
    if not seen.checkpoint:
        yield "file type", seen.file_type or _MISSING
    for use in seen.types:
        yield f"stored as {use.type_name}", f"{use.n_tensors} tensors, {use.n_bytes:,} bytes"
    yield "tensor data" if seen.checkpoint else "file size", f"{seen.n_bytes:,} bytes"
    for finding in seen.problems:
        yield finding.level, f"{finding.key}: {finding.found}, expected {finding.expected}; {finding.fix}"


def _kind(seen: Inspection) -> str:
    if seen.checkpoint:
        facts = seen.checkpoint
        what = "drafter checkpoint" if facts.config else "checkpoint"
        return f"{what} ({facts.dialect or 'no architecture named'})"
    if seen.drafter is None:
        return f"{seen.architecture or 'unnamed'} model"
    kind = "DFlash 2 drafter" if seen.drafter.version == 2 else "DFlash drafter (v1, no selector)"
    return f"{kind}, spelled for a fork ({seen.architecture})" if seen.kind == "fork drafter" else kind


def _drafter_rows(facts: DrafterFacts) -> Iterator[Row]:
    yield "block size", _count(facts.block_size, "tokens")
    yield "mask token", _count(facts.mask_token_id)
    yield "taps (input of target layer)", _list(facts.taps)
    yield "taps (Hugging Face ids)", _list(facts.hf_taps)
    yield from _attention_rows(facts.attention)
    yield from _dflash2_rows(facts.convolution, facts.selector)
    yield "rope", _rope_text(facts.rope)
    yield "embeddings and head", "its own" if facts.own_embeddings else "the target's"
    if facts.draft_vocab_size is not None:
        yield "head's vocabulary", _count(facts.draft_vocab_size, "tokens")


def _checkpoint_rows(facts: CheckpointFacts) -> Iterator[Row]:
    if facts.config:
        yield from _config_rows(facts.config)
    yield "quantisation", facts.quantization or "none"
    yield "files", ", ".join(facts.files) or _MISSING
    yield "convertible", "yes" if facts.convertible else f"no: {facts.reason}"


def _config_rows(config: DrafterConfig) -> Iterator[Row]:
    yield "block size", _count(config.block_size, "tokens")
    yield "mask token", _count(config.mask_token_id)
    yield "taps (Hugging Face ids)", _list(config.taps)
    yield from _attention_rows(config.attention)
    yield from _dflash2_rows(config.convolution, config.selector)
    for note in config.notes:
        yield "note", note


def _attention_rows(attention: Attention) -> Iterator[Row]:
    n_sliding = sum(attention.sliding)
    if n_sliding:
        yield (
            "sliding layers",
            f"{n_sliding}, window {attention.window} tokens, {_causality(attention.causal_sliding)}",
        )
    if n_sliding < len(attention.sliding):
        yield "full layers", f"{len(attention.sliding) - n_sliding}, {_causality(attention.causal_full)}"


def _dflash2_rows(convolution: Convolution | None, selector: Selector | None) -> Iterator[Row]:
    if convolution:
        yield "convolution", f"{convolution.taps} taps, groups of {convolution.group} channels"
    if selector:
        yield "selector", f"top {selector.top_k}, rank {selector.rank}"


def _rope_text(rope: RopeFacts) -> str:
    parts = [f"theta {rope.theta:g}" if rope.theta is not None else "theta missing"]
    if rope.scaling:
        parts.append(f"{rope.scaling} x{rope.factor:g}" if rope.factor is not None else rope.scaling)
    if rope.sections:
        parts.append(f"M-RoPE sections {_list(rope.sections)}")
    return ", ".join(parts)


def _count(value: int | None, unit: str = "") -> str:
    return _MISSING if value is None else f"{value} {unit}".strip()


def _list(values: Sequence[int]) -> str:
    return ", ".join(map(str, values)) if values else _MISSING


def _causality(causal: bool) -> str:
    return "causal" if causal else "not causal"
