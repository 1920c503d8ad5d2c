"""Which tensors a drafter has, in the checkpoint and in the GGUF file, with their exact shapes.

One table row is a tensor: Hugging Face name, GGUF name, shape in symbols, outermost dimension first.
Names and shapes: loader of the pinned llama.cpp (src/models/dflash.cpp).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dflash2.converter.config import DrafterConfig
from dflash2.converter.dialects.biases import zero_biases
from dflash2.converter.dialects.vocabulary import target_ids
from dflash2.converter.sources import Computed, HalfSplit, Source, Stored
from dflash2.errors import CheckpointError, UnsupportedCheckpointError

_Row = tuple[str, str, tuple[str, ...]]

_MODEL: tuple[_Row, ...] = (
    ("fc.weight", "fc.weight", ("hidden", "taps*hidden")),
    ("hidden_norm.weight", "enc.output_norm.weight", ("hidden",)),
    ("norm.weight", "output_norm.weight", ("hidden",)),
)
_SELECTOR: tuple[_Row, ...] = (
    ("candidate_selector.predecessor_codebook.weight", "selector_predecessor.weight", ("vocab", "rank")),
    ("candidate_selector.successor_codebook.weight", "selector_successor.weight", ("vocab", "rank")),
    ("candidate_selector.hidden_projection.weight", "selector_hidden.weight", ("rank", "hidden")),
)
_LAYER: tuple[_Row, ...] = (
    ("input_layernorm.weight", "attn_norm.weight", ("hidden",)),
    ("self_attn.q_proj.weight", "attn_q.weight", ("query", "hidden")),
    ("self_attn.k_proj.weight", "attn_k.weight", ("key", "hidden")),
    ("self_attn.v_proj.weight", "attn_v.weight", ("key", "hidden")),
    ("self_attn.o_proj.weight", "attn_output.weight", ("hidden", "query")),
    ("self_attn.q_norm.weight", "attn_q_norm.weight", ("head",)),
    ("self_attn.k_norm.weight", "attn_k_norm.weight", ("head",)),
    ("post_attention_layernorm.weight", "ffn_norm.weight", ("hidden",)),
    ("mlp.gate_proj.weight", "ffn_gate.weight", ("ffn", "hidden")),
    ("mlp.up_proj.weight", "ffn_up.weight", ("ffn", "hidden")),
    ("mlp.down_proj.weight", "ffn_down.weight", ("hidden", "ffn")),
)
_CONVOLUTION_LAYER: tuple[_Row, ...] = (
    ("attention_conv.base_kernel", "attn_conv_base", ("sides", "kernel", "hidden")),
    ("attention_conv.kernel_projection.weight", "attn_conv_proj.weight", ("kernels", "hidden")),
    ("mlp_conv.base_kernel", "ffn_conv_base", ("sides", "kernel", "hidden")),
    ("mlp_conv.kernel_projection.weight", "ffn_conv_proj.weight", ("kernels", "hidden")),
)
_SINKS: _Row = ("self_attn.attention_sink_bias", "attn_sinks.weight", ("heads",))
_EMBEDDING: _Row = ("embed_tokens.weight", "token_embd.weight", ("vocab", "hidden"))
_HEAD: _Row = ("lm_head.weight", "output.weight", ("vocab", "hidden"))
_DRAFT_HEAD: _Row = ("lm_head.weight", "output.weight", ("draft_vocab", "hidden"))
# Buffers that exports carry although they follow from the config.
_COMPUTED_SUFFIX = "rotary_emb.inv_freq"
_COMPARED_ROWS = 4096  # at once, of two tables
_FLOATS = ("BF16", "F16", "F32")
# Rows of these are pairs of rotated dimensions.
_ROPED = ("attn_q.weight", "attn_k.weight", "attn_q_norm.weight", "attn_k_norm.weight")


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor of the output: its GGUF `name` and where its values come from."""

    name: str
    source: Source

    @property
    def shape(self) -> tuple[int, ...]:
        """Outermost dimension first."""
        return self.source.shape

    @property
    def n_elements(self) -> int:
        """Number of parameters."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class TensorPlan:
    """All tensors of the output in file order, and what was left out and why."""

    tensors: tuple[PlannedTensor, ...]
    notes: tuple[str, ...]

    @property
    def n_parameters(self) -> int:
        """Number of parameters of the whole drafter."""
        return sum(tensor.n_elements for tensor in self.tensors)


def plan_tensors(folder: Path, config: DrafterConfig, stored: Mapping[str, Source]) -> TensorPlan:
    """Match the checkpoint in `folder` against what `config` implies, tensor for tensor.

    Raises CheckpointError for a tensor that is missing, of another shape or unknown to the plan,
    UnsupportedCheckpointError for one that is not stored as BF16, F16 or F32.
    """
    rows, dropped, notes = _rows(folder, config, stored)
    _check_names(folder, config, stored, [source for source, _, _ in rows], dropped)
    sizes = _sizes(config)
    planned = []
    for source, name, symbols in rows:
        shape = tuple(sizes[symbol] for symbol in symbols)
        values = _checked(stored[source], shape)
        reorder = not config.rope.neox and name.endswith(_ROPED)
        planned.append(PlannedTensor(name, HalfSplit(values, config.head_dim) if reorder else values))
    if config.draft_vocab_size:
        ids = target_ids(folder, stored, config.draft_vocab_size, config.vocab_size, config.draft_vocab_map)
        planned.append(PlannedTensor("d2t", ids))
    if config.rope.frequency_factors:
        factors = np.array(config.rope.frequency_factors, np.float32)
        planned.append(PlannedTensor("rope_freqs.weight", Computed(factors, "the rope factors of config.json")))
    return TensorPlan(tuple(planned), notes)


def _check_names(
    folder: Path, config: DrafterConfig, stored: Mapping[str, Source], wanted: list[str], dropped: set[str]
) -> None:
    """A tensor that does not belong goes first: it is often the one that is missing, under another name."""
    known = {*wanted, *dropped, *config.unused_tensors}
    missing = next((name for name in wanted if name not in stored), None)
    for name, values in stored.items():
        if name not in known and not name.endswith(_COMPUTED_SUFFIX):
            also = f" Besides, the tensor {missing!r} is missing." if missing else ""
            raise CheckpointError(
                f"{values.label} does not belong to a {config.architecture} of {config.layers}"
                f" layers; converting without it would change the drafter.{also}"
            )
    if missing:
        raise CheckpointError(f"{folder} lacks the tensor {missing!r}; download its safetensors files again.")


def _rows(
    folder: Path, config: DrafterConfig, stored: Mapping[str, Source]
) -> tuple[list[_Row], set[str], tuple[str, ...]]:
    embeddings, dropped, notes = _embedding_rows(config, stored)
    if config.attention_bias:
        biases, bias_notes = zero_biases(folder, config.layers, stored)
        dropped, notes = dropped | biases, notes + bias_notes
    has_sinks = config.attention_sinks or any(name.endswith(_SINKS[0]) for name in stored)
    layer_rows = _LAYER + (_CONVOLUTION_LAYER if config.convolution else ()) + ((_SINKS,) if has_sinks else ())
    layers = [
        (f"layers.{layer}.{source}", f"blk.{layer}.{name}", symbols)
        for layer in range(config.layers)
        for source, name, symbols in layer_rows
    ]
    return [*embeddings, *_MODEL, *(_SELECTOR if config.selector else ()), *layers], dropped, notes


def _embedding_rows(
    config: DrafterConfig, stored: Mapping[str, Source]
) -> tuple[list[_Row], set[str], tuple[str, ...]]:
    """Own embeddings and head both or neither: with one of them the loader would tie or mix it with the target's."""
    present = [row for row in (_EMBEDDING, _HEAD) if row[0] in stored]
    if config.draft_vocab_size:
        # A head of fewer rows is the drafter's own; the embeddings may still be the target's.
        return [row for row in present if row == _EMBEDDING] + [_DRAFT_HEAD], set(), ()
    if config.own_embeddings and len(present) == 2:
        _refuse_contradicted_head(config, stored)
        return present, set(), ()
    if config.own_embeddings and present == [_EMBEDDING] and config.tied_embeddings:
        return present, set(), ()
    dropped = {row[0] for row in present}
    note = f"{' and '.join(sorted(dropped))} left out: the drafter uses the target's embeddings and head."
    return [], dropped, (note,) if dropped else ()


def _refuse_contradicted_head(config: DrafterConfig, stored: Mapping[str, Source]) -> None:
    """Raise CheckpointError for a head that config.json denies: the reference would draft with another one."""
    embeddings, head = stored[_EMBEDDING[0]], stored[_HEAD[0]]
    if not config.own_head:
        raise CheckpointError(f"{head.label} is there, but 'has_lm_head' is false; correct config.json or remove it.")
    if config.tied_embeddings and not _equal(embeddings, head):
        raise CheckpointError(
            f"{head.label} differs from {_EMBEDDING[0]!r}, but 'tie_word_embeddings' is true; correct config.json or"
            " remove the head."
        )


def _equal(one: Source, other: Source) -> bool:
    """Whether two matrices hold the same values, compared in pieces."""
    if one.shape != other.shape:
        return False
    starts = range(0, one.shape[0], _COMPARED_ROWS)
    counts = (min(_COMPARED_ROWS, one.shape[0] - start) for start in starts)
    return all(
        np.array_equal(one.rows(start, count), other.rows(start, count))
        for start, count in zip(starts, counts, strict=True)
    )


def _sizes(config: DrafterConfig) -> dict[str, int]:
    sizes = {
        "hidden": config.hidden_size,
        "taps*hidden": len(config.taps) * config.hidden_size,
        "query": config.heads * config.head_dim,
        "key": config.kv_heads * config.head_dim,
        "head": config.head_dim,
        "ffn": config.feed_forward_size,
        "vocab": config.vocab_size,
        "draft_vocab": config.draft_vocab_size or 0,
        "heads": config.heads,
    }
    if config.convolution and config.selector:
        taps, groups = config.convolution.taps, config.hidden_size // config.convolution.group
        sizes |= {"sides": 2, "kernel": taps, "kernels": 2 * taps * groups, "rank": config.selector.rank}
    return sizes


def _checked(source: Source, shape: tuple[int, ...]) -> Source:
    if isinstance(source, Stored) and source.tensor.dtype not in _FLOATS:
        raise UnsupportedCheckpointError(
            f"{source.label} is stored as {source.tensor.dtype}; convert the BF16, F16 or F32 original."
        )
    if source.shape != shape:
        raise CheckpointError(f"{source.label} has shape {list(source.shape)}, config.json implies {list(shape)}.")
    return source
