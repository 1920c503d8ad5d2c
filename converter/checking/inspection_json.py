"""An inspection as JSON values: the schema `dflash2.inspect/1`, described in docs/inspect.md.

Every field is always there; what is not known is null. A field's meaning never changes under one schema number, and
fields may be added.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflash2.converter.checking.checkpoint_facts import CheckpointFacts
from dflash2.converter.checking.drafter_facts import DrafterFacts
from dflash2.converter.config import Attention, Convolution, DrafterConfig, Selector

if TYPE_CHECKING:
    from dflash2.converter.checking.inspection import Inspection

SCHEMA = "dflash2.inspect/1"

_Json = dict[str, object]


def inspection_dict(seen: Inspection, *, tensors: bool) -> _Json:
    """JSON values of an inspection; `tensors` adds the list of all of them."""
    result: _Json = {
        "schema": SCHEMA,
        "path": str(seen.path),
        "kind": seen.kind,
        "architecture": seen.architecture or None,
        "name": seen.name,
        "license": seen.license,
        "file_type": seen.file_type,
        "bytes": seen.n_bytes,
        "parameters": seen.n_parameters,
        "layers": seen.layers,
        "hidden_size": seen.hidden_size,
        "context_length": seen.context_length,
        "vocab_size": seen.vocab_size,
        "n_tensors": len(seen.tensors),
        "types": [{"type": use.type_name, "tensors": use.n_tensors, "bytes": use.n_bytes} for use in seen.types],
        "shard": {"number": seen.shard.number, "count": seen.shard.count, "tensors": seen.shard.n_tensors}
        if seen.shard
        else None,
        "drafter": _drafter(seen),
        "checkpoint": _checkpoint(seen.checkpoint) if seen.checkpoint else None,
        "problems": [finding.to_dict() for finding in seen.problems],
    }
    if tensors:
        result["tensors"] = [
            {"name": t.name, "shape": list(t.shape), "type": t.type_name, "bytes": t.n_bytes} for t in seen.tensors
        ]
    return result


def _drafter(seen: Inspection) -> _Json | None:
    """The same fields for a GGUF drafter and for the config of a checkpoint."""
    if seen.drafter:
        return _of_gguf(seen.drafter)
    config = seen.checkpoint.config if seen.checkpoint else None
    return _of_config(config) if config else None


def _of_gguf(facts: DrafterFacts) -> _Json:
    return {
        "version": facts.version,
        "block_size": facts.block_size,
        "mask_token_id": facts.mask_token_id,
        "taps": list(facts.hf_taps),
        "gguf_taps": list(facts.taps),
        "attention": _attention(facts.attention),
        "convolution": _convolution(facts.convolution),
        "selector": _selector(facts.selector),
        "rope": {
            "theta": facts.rope.theta,
            "scaling": facts.rope.scaling,
            "factor": facts.rope.factor,
            "sections": list(facts.rope.sections),
        },
        "own_embeddings": facts.own_embeddings,
        "own_head": facts.own_head,
        "draft_vocab_size": facts.draft_vocab_size,
        "logit_scale": facts.logit_scale,
        "logit_softcap": facts.logit_softcap,
        "embedding_scale": facts.embedding_scale,
        "attention_value_scale": facts.attention_value_scale,
        "target_layers": None,
    }


def _of_config(config: DrafterConfig) -> _Json:
    scaling = config.rope.scaling
    return {
        "version": 2 if config.selector else 1,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "taps": list(config.taps),
        "gguf_taps": [tap + 1 for tap in config.taps],
        "attention": _attention(config.attention),
        "convolution": _convolution(config.convolution),
        "selector": _selector(config.selector),
        "rope": {
            "theta": config.rope.theta,
            "scaling": "llama3" if config.rope.frequency_factors else scaling.kind if scaling else None,
            "factor": scaling.factor if scaling else None,
            "sections": [],
        },
        "own_embeddings": None,
        "own_head": None,
        "draft_vocab_size": None,
        "logit_scale": config.logit_scale,
        "logit_softcap": config.logit_softcap,
        "embedding_scale": config.embedding_scale,
        "attention_value_scale": config.attention_value_scale,
        "target_layers": config.target_layers,
    }


def _attention(attention: Attention) -> _Json:
    return {
        "sliding": list(attention.sliding),
        "window": attention.window,
        "causal_full": attention.causal_full,
        "causal_sliding": attention.causal_sliding,
    }


def _convolution(convolution: Convolution | None) -> _Json | None:
    return {"taps": convolution.taps, "group": convolution.group} if convolution else None


def _selector(selector: Selector | None) -> _Json | None:
    return {"rank": selector.rank, "top_k": selector.top_k} if selector else None


def _checkpoint(facts: CheckpointFacts) -> _Json:
    return {
        "dialect": facts.dialect,
        "convertible": facts.convertible,
        "reason": facts.reason,
        "quantization": facts.quantization,
        "files": list(facts.files),
    }
