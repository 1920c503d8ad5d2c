"""Tiny targets of every kind that publishes layer inputs, and drafters that are often right or hardly ever.

The targets are random except for one thing: the head looks only at `CYCLE` tokens, each of which points at the
next. What follows a token is thus mostly its successor, but the random layers, and with them the context, decide
otherwise often enough. A drafter whose selector knows the cycle is right while the cycle holds.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from factories import _add_tokenizer, drafter_config, drafter_tensors, write_checkpoint
from gguf import GGUFWriter
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize
from gguf_edit import values_of

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FEED_FORWARD, VOCAB, LAYERS = 128, 4, 2, 32, 128, 288, 6
EXPERTS, EXPERT_WIDTH = 4, 64
WINDOW = 32
CONTEXT = 16384
CYCLE = tuple(range(40, 48))
MASK_TOKEN, BLOCK = 1, 8
TAPS = (0, 2, 4)  # as a checkpoint counts them: outputs of these layers

Values = Iterator[tuple[str, np.ndarray]]


class _Weights:
    """Random matrices [rows, columns] that keep a vector's length, and vectors of ones.

    `branch` scales what a layer adds to the residual stream: the more, the less the cycle holds.
    """

    def __init__(self, seed: int, branch: float) -> None:
        self.random = np.random.default_rng(seed)
        self.branch = branch

    def matrix(self, *shape: int, scale: float = 1.0) -> np.ndarray:
        return self.random.normal(0, scale * shape[-1] ** -0.5, shape).astype(np.float32)

    def ones(self, n: int, value: float = 1.0) -> np.ndarray:
        return np.full(n, value, np.float32)


def _attention(w: _Weights, p: str, *, norms: bool = False, gate: int = 1, bias: bool = False) -> Values:
    """Projections of one attention layer; `gate` = 2 doubles the query's rows (qwen35: query and gate)."""
    yield p + "attn_q.weight", w.matrix(gate * HEADS * HEAD_DIM, HIDDEN)
    yield p + "attn_k.weight", w.matrix(KV_HEADS * HEAD_DIM, HIDDEN)
    yield p + "attn_v.weight", w.matrix(KV_HEADS * HEAD_DIM, HIDDEN)
    yield p + "attn_output.weight", w.matrix(HIDDEN, HEADS * HEAD_DIM, scale=w.branch)
    if bias:
        yield p + "attn_output.bias", w.ones(HIDDEN, 0.01)
    if norms:
        yield p + "attn_q_norm.weight", w.ones(HEAD_DIM)
        yield p + "attn_k_norm.weight", w.ones(HEAD_DIM)


def _dense(w: _Weights, p: str) -> Values:
    yield p + "ffn_gate.weight", w.matrix(FEED_FORWARD, HIDDEN)
    yield p + "ffn_up.weight", w.matrix(FEED_FORWARD, HIDDEN)
    yield p + "ffn_down.weight", w.matrix(HIDDEN, FEED_FORWARD, scale=w.branch)


def _experts(w: _Weights, p: str) -> Values:
    yield p + "ffn_gate_inp.weight", w.matrix(EXPERTS, HIDDEN)
    yield p + "ffn_gate_exps.weight", w.matrix(EXPERTS, EXPERT_WIDTH, HIDDEN)
    yield p + "ffn_up_exps.weight", w.matrix(EXPERTS, EXPERT_WIDTH, HIDDEN)
    yield p + "ffn_down_exps.weight", w.matrix(EXPERTS, HIDDEN, EXPERT_WIDTH, scale=w.branch)


def _shared_expert(w: _Weights, p: str) -> Values:
    yield p + "ffn_gate_inp_shexp.weight", w.matrix(HIDDEN)
    yield p + "ffn_gate_shexp.weight", w.matrix(EXPERT_WIDTH, HIDDEN)
    yield p + "ffn_up_shexp.weight", w.matrix(EXPERT_WIDTH, HIDDEN)
    yield p + "ffn_down_shexp.weight", w.matrix(HIDDEN, EXPERT_WIDTH, scale=w.branch)


def _norms(w: _Weights, p: str, *names: str, value: float = 1.0) -> Values:
    for name in names:
        yield f"{p}{name}.weight", w.ones(HIDDEN, value)


def _llama(w: _Weights, layer: int) -> Values:
    p = f"blk.{layer}."
    yield from _norms(w, p, "attn_norm", "ffn_norm")
    yield from _attention(w, p)
    yield from _dense(w, p)


def _qwen3(w: _Weights, layer: int) -> Values:
    p = f"blk.{layer}."
    yield from _norms(w, p, "attn_norm", "ffn_norm")
    yield from _attention(w, p, norms=True)
    yield from _dense(w, p)


def _gemma4(w: _Weights, layer: int) -> Values:
    p = f"blk.{layer}."
    yield from _norms(w, p, "attn_norm", "ffn_norm")
    # These scale what a layer adds; gemma embeds with a factor of sqrt(hidden size), which the embedding undoes.
    yield from _norms(w, p, "post_attention_norm", "post_ffw_norm", value=w.branch)
    yield from _attention(w, p, norms=True)
    yield from _dense(w, p)


def _gpt_oss(w: _Weights, layer: int) -> Values:
    p = f"blk.{layer}."
    yield from _norms(w, p, "attn_norm", "post_attention_norm")
    yield from _attention(w, p, bias=True)
    yield p + "attn_sinks.weight", w.ones(HEADS, 0.5)
    yield from _experts(w, p)
    yield p + "ffn_gate_inp.bias", w.matrix(EXPERTS, scale=0.1)
    yield p + "ffn_gate_exps.bias", w.matrix(EXPERTS, EXPERT_WIDTH, scale=0.1)
    yield p + "ffn_up_exps.bias", w.matrix(EXPERTS, EXPERT_WIDTH, scale=0.1)
    yield p + "ffn_down_exps.bias", w.matrix(EXPERTS, HIDDEN, scale=0.1)


_STATE, _GROUPS, _VALUE_HEADS, _CONV = 32, 2, 4, 4  # gated delta net
_KEYS, _DELTA = _STATE * _GROUPS, _STATE * _VALUE_HEADS


def _delta_net(w: _Weights, p: str, *, fused: bool) -> Values:
    yield p + "attn_qkv.weight", w.matrix(2 * _KEYS + _DELTA, HIDDEN)
    yield p + "attn_gate.weight", w.matrix(_DELTA, HIDDEN)
    yield p + "ssm_conv1d.weight", w.matrix(2 * _KEYS + _DELTA, _CONV)
    yield p + "ssm_dt.bias", w.ones(_VALUE_HEADS, -1.0)
    yield p + "ssm_a", w.ones(_VALUE_HEADS, -1.0)
    if fused:
        yield p + "ssm_ba.weight", w.matrix(2 * _VALUE_HEADS, HIDDEN)
    else:
        yield p + "ssm_beta.weight", w.matrix(_VALUE_HEADS, HIDDEN)
        yield p + "ssm_alpha.weight", w.matrix(_VALUE_HEADS, HIDDEN)
    yield p + "ssm_norm.weight", w.ones(_STATE)
    yield p + "ssm_out.weight", w.matrix(HIDDEN, _DELTA, scale=w.branch)


def _qwen35(w: _Weights, layer: int, *, experts: bool = False, fused: bool = False) -> Values:
    """Full attention in every third layer here, the gated delta net in the others."""
    p = f"blk.{layer}."
    yield from _norms(w, p, "attn_norm", "post_attention_norm")
    if layer % 3 == 2:
        yield from _attention(w, p, norms=True, gate=2)
    else:
        yield from _delta_net(w, p, fused=fused)
    if experts:
        yield from _experts(w, p)
        yield from _shared_expert(w, p)
    else:
        yield from _dense(w, p)


def _qwen35moe(w: _Weights, layer: int) -> Values:
    return _qwen35(w, layer, experts=True)


def _qwen3next(w: _Weights, layer: int) -> Values:
    return _qwen35(w, layer, experts=True, fused=True)


def _lfm2(w: _Weights, layer: int) -> Values:
    p = f"blk.{layer}."
    yield from _norms(w, p, "attn_norm", "ffn_norm")
    if layer % 3 == 2:
        yield from _attention(w, p, norms=True)
    else:
        yield p + "shortconv.conv.weight", w.matrix(HIDDEN, 3)
        yield p + "shortconv.in_proj.weight", w.matrix(3 * HIDDEN, HIDDEN)
        yield p + "shortconv.out_proj.weight", w.matrix(HIDDEN, HIDDEN, scale=w.branch)
    yield from _dense(w, p)


_MAMBA_INNER, _MAMBA_HEADS, _MAMBA_STATE, _MAMBA_GROUPS = 128, 4, 32, 2
_MAMBA_CONV = _MAMBA_INNER + 2 * _MAMBA_GROUPS * _MAMBA_STATE


def _nemotron_h(w: _Weights, layer: int) -> Values:
    """Mamba 2, attention and MLP layers in turn."""
    p = f"blk.{layer}."
    yield from _norms(w, p, "attn_norm")
    if layer % 3 == 0:
        yield p + "ssm_in.weight", w.matrix(_MAMBA_INNER + _MAMBA_CONV + _MAMBA_HEADS, HIDDEN)
        yield p + "ssm_conv1d.weight", w.matrix(_MAMBA_CONV, 4)
        yield p + "ssm_conv1d.bias", w.ones(_MAMBA_CONV, 0.0)
        yield p + "ssm_dt.bias", w.ones(_MAMBA_HEADS, -1.0)
        yield p + "ssm_a", -np.ones((_MAMBA_HEADS, 1), np.float32)
        yield p + "ssm_d", np.ones((_MAMBA_HEADS, 1), np.float32)
        yield p + "ssm_norm.weight", np.ones((_MAMBA_GROUPS, _MAMBA_INNER // _MAMBA_GROUPS), np.float32)
        yield p + "ssm_out.weight", w.matrix(HIDDEN, _MAMBA_INNER, scale=w.branch)
    elif layer % 3 == 1:
        yield from _attention(w, p)
    else:
        yield p + "ffn_up.weight", w.matrix(FEED_FORWARD, HIDDEN)
        yield p + "ffn_down.weight", w.matrix(HIDDEN, FEED_FORWARD, scale=w.branch)


_EXPERT_KEYS = {"expert_count": EXPERTS, "expert_used_count": 2, "expert_feed_forward_length": EXPERT_WIDTH}
_DELTA_KEYS = {
    "rope.dimension_sections": [4, 6, 6, 0],
    "ssm.conv_kernel": _CONV,
    "ssm.inner_size": _DELTA,
    "ssm.state_size": _STATE,
    "ssm.time_step_rank": _VALUE_HEADS,
    "ssm.group_count": _GROUPS,
    "full_attention_interval": 3,
}


class Kind(NamedTuple):
    """How one architecture is laid out: tensors of a layer, further keys, and what is special about the rest."""

    layer: Callable[[_Weights, int], Values]
    keys: Mapping[str, object] = {}
    embedding_scale: float = 1.0
    final_norm: str = "output_norm"
    rope_factors: bool = False
    branch: float = 2.0


KINDS = {
    "qwen3": Kind(_qwen3, branch=1.45),
    "llama": Kind(_llama, branch=1.6),
    "gemma4": Kind(
        _gemma4,
        {
            "attention.sliding_window": WINDOW,
            "attention.sliding_window_pattern": [layer % 3 != 2 for layer in range(LAYERS)],
            "attention.key_length_swa": HEAD_DIM,
            "attention.value_length_swa": HEAD_DIM,
            "embedding_length_per_layer_input": 0,
            "rope.dimension_count": HEAD_DIM,
            "rope.dimension_count_swa": HEAD_DIM,
            "final_logit_softcapping": 30.0,
        },
        embedding_scale=HIDDEN**-0.5,
        rope_factors=True,
        branch=1.0,
    ),
    "gpt-oss": Kind(_gpt_oss, {"attention.sliding_window": WINDOW, **_EXPERT_KEYS}),
    "qwen35": Kind(_qwen35, _DELTA_KEYS),
    "qwen35moe": Kind(_qwen35moe, {**_DELTA_KEYS, **_EXPERT_KEYS, "expert_shared_feed_forward_length": EXPERT_WIDTH}),
    "qwen3next": Kind(_qwen3next, {**_DELTA_KEYS, **_EXPERT_KEYS, "expert_shared_feed_forward_length": EXPERT_WIDTH}),
    "lfm2": Kind(
        _lfm2,
        {
            "attention.head_count_kv": [KV_HEADS if layer % 3 == 2 else 0 for layer in range(LAYERS)],
            "shortconv.l_cache": 3,
        },
        final_norm="token_embd_norm",
        branch=1.2,
    ),
    "nemotron_h": Kind(
        _nemotron_h,
        {
            "attention.head_count_kv": [KV_HEADS if layer % 3 == 1 else 0 for layer in range(LAYERS)],
            "feed_forward_length": [FEED_FORWARD if layer % 3 == 2 else 0 for layer in range(LAYERS)],
            "attention.layer_norm_epsilon": 1e-6,
            "ssm.conv_kernel": 4,
            "ssm.inner_size": _MAMBA_INNER,
            "ssm.state_size": _MAMBA_STATE,
            "ssm.time_step_rank": _MAMBA_HEADS,
            "ssm.group_count": _MAMBA_GROUPS,
        },
    ),
}
# Kinds whose state cannot drop a suffix; of these, `qwen3next` keeps no snapshots in llama.cpp.
RECURRENT = ("qwen35", "qwen35moe", "qwen3next", "lfm2", "nemotron_h")


def make_kind(path: Path, architecture: str, kind: Kind | None = None, *, seed: int = 0) -> Path:
    """A target GGUF of `architecture` with Q8_0 matrices, so that row counts change no bit on a CPU.

    `kind` says how it is laid out, when it is none of `KINDS`.
    """
    kind = kind or KINDS[architecture]
    writer = GGUFWriter(path, architecture)
    common = {
        "block_count": LAYERS,
        "context_length": CONTEXT,
        "embedding_length": HIDDEN,
        "feed_forward_length": FEED_FORWARD,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 10000.0,
        "rope.dimension_count": HEAD_DIM,
    }
    for key, value in {**common, **kind.keys}.items():
        _add_key(writer, f"{architecture}.{key}", value)
    _add_tokenizer(writer, VOCAB)
    for name, values in _all_tensors(kind, np.random.default_rng(seed), seed):
        packed = _pack(name, values)
        kept = GGMLQuantizationType.F32 if packed is values else GGMLQuantizationType.Q8_0
        writer.add_tensor(name, packed, raw_dtype=kept)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_key(writer: GGUFWriter, key: str, value: object) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_uint32(key, value)


def _pack(name: str, values: np.ndarray) -> np.ndarray:
    """Q8_0 for what is multiplied with many rows; F32 for vectors, biases, convolutions and what is added."""
    added = "conv" in name.rsplit(".", 2)[-2] or "norm" in name or name.endswith("_ape.weight")
    plain = values.ndim == 1 or not name.endswith(".weight") or added
    return values if plain else quantize(values, GGMLQuantizationType.Q8_0)


def _all_tensors(kind: Kind, random: np.random.Generator, seed: int) -> Iterable[tuple[str, np.ndarray]]:
    embedding = random.normal(0, 1, (VOCAB, HIDDEN)).astype(np.float32)
    yield "token_embd.weight", embedding * np.float32(kind.embedding_scale)
    head = np.zeros((VOCAB, HIDDEN), np.float32)
    for token, successor in zip(CYCLE, (*CYCLE[1:], CYCLE[0]), strict=True):
        head[successor] = (embedding[token] + embedding[MASK_TOKEN]) / HIDDEN  # a row of mask tokens offers the cycle
    yield "output.weight", head
    yield f"{kind.final_norm}.weight", np.ones(HIDDEN, np.float32)
    if kind.rope_factors:
        yield "rope_freqs.weight", np.ones(HEAD_DIM // 2, np.float32)
    weights = _Weights(seed + 1, kind.branch)
    for layer in range(LAYERS):
        yield from kind.layer(weights, layer)


def copying_drafter(folder: Path, target: Path, **config: object) -> Path:
    """A DFlash 2 checkpoint that proposes the cycle: the target's head offers its tokens, the selector their order.

    Attention and MLP add nothing, so every drafted row is the embedding of the mask token.
    """
    settings = _config(**config)
    tensors = {name: np.zeros_like(values) for name, values in drafter_tensors(settings).items()}
    for name, values in tensors.items():
        if name.endswith("norm.weight"):
            values[:] = 1
    row = values_of(target, "token_embd.weight")[MASK_TOKEN]
    row = row / np.sqrt(np.mean(row**2))
    prefix = "candidate_selector."
    for index, token in enumerate(CYCLE):
        tensors[prefix + "successor_codebook"][token, index] = 4.0
        tensors[prefix + "predecessor_codebook"][token, (index + 1) % len(CYCLE)] = 4.0
    tensors[prefix + "hidden_projection.weight"][:] = row / HIDDEN
    return write_checkpoint(folder, settings, tensors, dtype="F32")


def random_drafter(folder: Path, version: int = 2, seed: int = 3, **config: object) -> Path:
    """A drafter with random weights, right by chance only."""
    settings = _config(version, **config)
    return write_checkpoint(folder, settings, drafter_tensors(settings, seed), dtype="F32")


def _config(version: int = 2, *, selector_rank: int = 32, taps: tuple[int, ...] = TAPS, **overrides: object) -> dict:
    draft = {"block_size": BLOCK, "mask_token_id": MASK_TOKEN, "target_layer_ids": list(taps)}
    if version == 2:
        draft |= {"selector_rank": selector_rank, "selector_top_k": len(CYCLE)}
    sizes = {
        "hidden_size": HIDDEN,
        "head_dim": HEAD_DIM,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "intermediate_size": FEED_FORWARD,
        "num_target_layers": LAYERS,
        "max_position_embeddings": CONTEXT,
        "block_size": BLOCK,
    }
    return drafter_config(version, dflash_config=draft, **{**sizes, **overrides})
