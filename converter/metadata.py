"""Metadata of a drafter GGUF: what the file says besides its tensors, with exact GGUF types."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import gguf
from gguf.constants import GGML_QUANT_VERSION, LlamaFileType

from dflash2.constants import DRAFTER_ARCHITECTURE
from dflash2.converter.config import DrafterConfig, RopeScaling
from dflash2.converter.entry import BOOL, BOOLS, F32, INTEGERS, STRING, STRINGS, U32, Entry, fits_f32
from dflash2.converter.provenance import InputFile, input_entries, source_entries
from dflash2.converter.targets.facts import Target
from dflash2.errors import CheckpointError
from dflash2.hub import Snapshot
from dflash2.model_card import read_card

_MASK_TOKEN = "tokenizer.ggml.mask_token_id"


def build_metadata(
    config: DrafterConfig,
    target: Target,
    drafter: Snapshot,
    file_type: LlamaFileType,
    n_parameters: int,
    *,
    target_source: Snapshot | None = None,
    inputs: Sequence[InputFile] = (),
) -> tuple[tuple[Entry, ...], Mapping[str, Callable[[], str]]]:
    """All keys of the file (origin, drafter, tokenizer of the target), and those that wait for the hash of a file.

    The mapping goes to `write_gguf(hashed=...)`, which calls them while it writes the tensors.
    """
    source = target_source or Snapshot(target.path)
    hashes, pending = input_entries(inputs)
    entries = (
        *_general(config, drafter, source, n_parameters),
        *source_entries(drafter, source),
        Entry("general.file_type", int(file_type), U32),
        Entry("general.quantization_version", GGML_QUANT_VERSION, U32),
        *(_named(entry) for entry in _drafter(config, target)),
        *hashes,
        *_tokenizer(config, target),
    )
    return entries, pending


def _named(entry: Entry) -> Entry:
    """With its full key; what is computed from numbers of the config must fit as they do."""
    key = f"{DRAFTER_ARCHITECTURE}.{entry.key}"
    if entry.type == F32 and isinstance(entry.value, float) and not fits_f32(entry.value):
        raise CheckpointError(
            f"The drafter's {key!r} is {entry.value:g}, which 32 bits do not hold; correct its config.json."
        )
    return Entry(key, entry.value, entry.type)


def _general(config: DrafterConfig, drafter: Snapshot, target: Snapshot, n_parameters: int) -> Iterator[Entry]:
    """Name, size label, licence and base models by upstream's own rules (model card, then repository or folder)."""
    yield Entry("general.type", "model", STRING)
    card = dict(read_card(drafter.path))
    if target.repo_id:
        card.setdefault("base_model", target.repo_id)
    # The folder of a snapshot is named by its commit.
    path = Path(drafter.repo_id) if drafter.repo_id else drafter.path.resolve()
    found = gguf.Metadata.apply_metadata_heuristic(
        gguf.Metadata(), card, {"_name_or_path": drafter.repo_id or config.name_or_path}, path, n_parameters
    )
    found.name = found.name or path.name
    found.size_label = found.size_label or gguf.size_label(n_parameters, 0, 0, 0)
    scratch = gguf.GGUFWriter(None, DRAFTER_ARCHITECTURE)
    found.set_gguf_meta_model(scratch)
    for key, entry in scratch.kv_data[0].items():
        if key == "general.architecture":
            continue
        value = entry.value
        if isinstance(value, str):
            yield Entry(key, value, STRING)
        elif isinstance(value, list) and value and all(isinstance(item, str) for item in value):
            yield Entry(key, tuple(value), STRINGS)
        elif isinstance(value, int):
            yield Entry(key, value, U32)


def _drafter(config: DrafterConfig, target: Target) -> Iterator[Entry]:
    """Keys below `dflash.`; names and types as the pinned llama.cpp reads them."""
    yield Entry("block_count", config.layers, U32)
    yield Entry("context_length", config.context_length, U32)
    yield Entry("embedding_length", config.hidden_size, U32)
    yield Entry("feed_forward_length", config.feed_forward_size, U32)
    yield Entry("attention.head_count", config.heads, U32)
    yield Entry("attention.head_count_kv", config.kv_heads, U32)
    yield Entry("attention.key_length", config.head_dim, U32)
    yield Entry("attention.value_length", config.head_dim, U32)
    yield Entry("attention.layer_norm_rms_epsilon", config.rms_epsilon, F32)
    yield Entry("block_size", config.block_size, U32)
    # The output of layer i is the input of layer i + 1: the only place where a tap is shifted.
    yield Entry("target_layers", tuple(tap + 1 for tap in config.taps), INTEGERS)
    yield from _attention(config)
    yield from _rope(config, target)
    if config.convolution and config.selector:
        yield Entry("conv_kernel_size", config.convolution.taps, U32)
        yield Entry("conv_group_size", config.convolution.group, U32)
        yield Entry("selector_rank", config.selector.rank, U32)
        yield Entry("selector_top_k", config.selector.top_k, U32)
    if config.activation:
        yield Entry("hidden_activation", config.activation, STRING)
    for key, value in (
        ("logit_scale", config.logit_scale),
        ("final_logit_softcapping", config.logit_softcap),
        ("embedding_scale", config.embedding_scale),
        ("attention.value_scale", config.attention_value_scale),
    ):
        if value is not None:
            yield Entry(key, value, F32)


def _attention(config: DrafterConfig) -> Iterator[Entry]:
    attention = config.attention
    yield Entry("attention.causal", attention.causal, BOOL)
    window = attention.window
    if attention.mixed_causality:
        yield Entry("attention.causal_swa", attention.causal_sliding, BOOL)
        # Layers without a window that are causal on their own need their own cache: a window that never ends.
        window = window or config.context_length
    if window:
        yield Entry("attention.sliding_window", window, U32)
        yield Entry("attention.sliding_window_pattern", attention.sliding, BOOLS)


def _rope(config: DrafterConfig, target: Target) -> Iterator[Entry]:
    rope = config.rope
    yield Entry("rope.freq_base", rope.theta, F32)
    if rope.dimensions != config.head_dim:
        yield Entry("rope.dimension_count", rope.dimensions, U32)
    if rope.scaling:
        yield from _rope_scaling(rope.scaling)
    if target.uses_mrope:
        # The draft ropes on time alone: one section takes every pair.
        yield Entry("rope.dimension_sections", (config.head_dim // 2, 0, 0, 0), INTEGERS)


def _rope_scaling(scaling: RopeScaling) -> Iterator[Entry]:
    yield Entry("rope.scaling.type", scaling.kind, STRING)
    yield Entry("rope.scaling.factor", scaling.factor, F32)
    if scaling.original_context is not None:
        yield Entry("rope.scaling.original_context_length", scaling.original_context, U32)
    if scaling.attention_factor != 1.0:
        yield Entry("rope.scaling.attn_factor", scaling.attention_factor, F32)


def _tokenizer(config: DrafterConfig, target: Target) -> Iterator[Entry]:
    """Every tokenizer key of the target as it is, except the mask token, which is the drafter's own."""
    yield from target.tokenizer
    yield Entry(_MASK_TOKEN, config.mask_token_id, U32)
