"""Tiny targets of the architectures that publish layer inputs only in a patched library."""

import numpy as np
from factories_targets import (
    EXPERT_WIDTH,
    EXPERTS,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    LAYERS,
    WINDOW,
    Kind,
    Values,
    _attention,
    _dense,
    _experts,
    _norms,
    _Weights,
)

_Q_RANK, _KV_RANK, _NOPE, _ROPE = 64, 64, 32, 32  # multi-head latent attention
_STREAMS = 4  # hyper-connections
_MIX = (2 + _STREAMS) * _STREAMS
_INDEX_HEADS, _INDEX_DIM, _POOL = 4, 32, 4


def _gemma3(w: _Weights, layer: int) -> Values:
    p = f"blk.{layer}."
    yield from _norms(w, p, "attn_norm", "ffn_norm")
    yield from _norms(w, p, "post_attention_norm", "post_ffw_norm", value=w.branch)
    yield from _attention(w, p, norms=True)
    yield from _dense(w, p)


def _latent_attention(w: _Weights, p: str, rope: int) -> Values:
    """Queries and keys/values through low ranks; `rope` of a head's dimensions are rotated."""
    yield p + "attn_q_a.weight", w.matrix(_Q_RANK, HIDDEN)
    yield p + "attn_q_a_norm.weight", w.ones(_Q_RANK)
    yield p + "attn_q_b.weight", w.matrix(HEADS * (_NOPE + rope), _Q_RANK)
    yield p + "attn_kv_a_mqa.weight", w.matrix(_KV_RANK + rope, HIDDEN)
    yield p + "attn_kv_a_norm.weight", w.ones(_KV_RANK)
    yield p + "attn_k_b.weight", w.matrix(HEADS, _KV_RANK, _NOPE)
    yield p + "attn_v_b.weight", w.matrix(HEADS, HEAD_DIM, _KV_RANK)
    yield p + "attn_output.weight", w.matrix(HIDDEN, HEADS * HEAD_DIM, scale=w.branch)


def _experts_and_shared(w: _Weights, p: str, *, bias: bool) -> Values:
    yield from _experts(w, p)
    if bias:
        yield p + "exp_probs_b.bias", w.matrix(EXPERTS, scale=0.1)
    yield p + "ffn_gate_shexp.weight", w.matrix(EXPERT_WIDTH, HIDDEN)
    yield p + "ffn_up_shexp.weight", w.matrix(EXPERT_WIDTH, HIDDEN)
    yield p + "ffn_down_shexp.weight", w.matrix(HIDDEN, EXPERT_WIDTH, scale=w.branch)


def _feed_forward(w: _Weights, p: str, layer: int) -> Values:
    """Dense in the first layer, experts in the others."""
    return _dense(w, p) if layer == 0 else _experts_and_shared(w, p, bias=True)


def _deepseek2(w: _Weights, layer: int) -> Values:
    p = f"blk.{layer}."
    yield from _norms(w, p, "attn_norm", "ffn_norm")
    yield from _latent_attention(w, p, _ROPE)
    yield from _feed_forward(w, p, layer)


def _laguna(w: _Weights, layer: int) -> Values:
    p = f"blk.{layer}."
    yield from _norms(w, p, "attn_norm", "ffn_norm")
    yield from _attention(w, p, norms=True)
    yield p + "attn_gate.weight", w.matrix(HEADS, HIDDEN)
    yield from _feed_forward(w, p, layer)


def _hyper_connection(w: _Weights, p: str) -> Values:
    """How four residual streams feed a sublayer and take its output; close to passing each stream on."""
    yield p + "_fn.weight", w.matrix(_MIX, _STREAMS * HIDDEN, scale=0.1)
    yield p + "_scale.weight", w.ones(3, 0.1)
    base = np.concatenate([np.full(_STREAMS, -1.1), np.zeros(_STREAMS), 4 * np.eye(_STREAMS).ravel()])
    yield p + "_base.weight", base.astype(np.float32)


def _kda(w: _Weights, p: str) -> Values:
    """Kimi delta attention: the recurrent layers."""
    inner = HEADS * HEAD_DIM
    for name in ("q", "k", "v"):
        yield p + f"attn_{name}.weight", w.matrix(inner, HIDDEN)
        yield p + f"ssm_conv1d_{name}.weight", w.matrix(inner, 1, 4)
    for name in ("f", "g"):
        yield p + f"ssm_{name}_a.weight", w.matrix(HEAD_DIM, HIDDEN)
        yield p + f"ssm_{name}_b.weight", w.matrix(inner, HEAD_DIM)
    yield p + "ssm_beta.weight", w.matrix(HEADS, HIDDEN)
    yield p + "ssm_a", w.ones(HEADS, -1.0)
    yield p + "ssm_dt.bias", w.ones(inner, -1.0)
    yield p + "ssm_norm.weight", w.ones(HEAD_DIM)
    yield p + "attn_output.weight", w.matrix(HIDDEN, inner, scale=w.branch)


def _indexer(w: _Weights, p: str) -> Values:
    """Picks the pools of four positions that a layer attends to."""
    yield p + "indexer.k_norm.weight", w.ones(_INDEX_DIM)
    yield p + "indexer.k_norm.bias", w.ones(_INDEX_DIM, 0.0)
    yield p + "indexer.proj.weight", w.matrix(_INDEX_HEADS, HIDDEN)
    yield p + "indexer.attn_k.weight", w.matrix(_INDEX_DIM, HIDDEN)
    yield p + "indexer.attn_q_b.weight", w.matrix(_INDEX_HEADS * _INDEX_DIM, _Q_RANK)
    yield p + "indexer_compressor_gate.weight", w.matrix(_INDEX_DIM, HIDDEN)
    yield p + "indexer_compressor_ape.weight", w.matrix(_POOL, _INDEX_DIM)


def _glm5_next(w: _Weights, layer: int) -> Values:
    p = f"blk.{layer}."
    yield from _norms(w, p, "attn_norm", "ffn_norm")
    yield from _hyper_connection(w, p + "hc_attn")
    yield from _hyper_connection(w, p + "hc_ffn")
    if layer % 3 == 2:
        yield from _latent_attention(w, p, 0)
        yield from _indexer(w, p)
    else:
        yield from _kda(w, p)
    yield from _feed_forward(w, p, layer)


_EXPERT_KEYS = {
    "expert_count": EXPERTS,
    "expert_used_count": 2,
    "expert_feed_forward_length": EXPERT_WIDTH,
    "expert_shared_count": 1,
    "expert_gating_func": 2,  # sigmoid
    "expert_weights_scale": 1.0,
    "leading_dense_block_count": 1,
}
_LATENT_KEYS = {
    "attention.q_lora_rank": _Q_RANK,
    "attention.kv_lora_rank": _KV_RANK,
    "attention.value_length": _KV_RANK,
    "attention.value_length_mla": HEAD_DIM,
}

PATCHED_KINDS = {
    "gemma3": Kind(_gemma3, {"attention.sliding_window": WINDOW}, embedding_scale=HIDDEN**-0.5, branch=1.2),
    "deepseek2": Kind(
        _deepseek2,
        {
            **_EXPERT_KEYS,
            **_LATENT_KEYS,
            "attention.head_count_kv": 1,
            "attention.key_length": _KV_RANK + _ROPE,
            "attention.key_length_mla": _NOPE + _ROPE,
            "rope.dimension_count": _ROPE,
        },
        branch=1.5,
    ),
    "laguna": Kind(
        _laguna,
        {
            **_EXPERT_KEYS,
            "attention.sliding_window": WINDOW,
            "expert_shared_feed_forward_length": EXPERT_WIDTH,
            "rope.dimension_count_swa": HEAD_DIM,
        },
        branch=1.14,
    ),
    "glm5-next": Kind(
        _glm5_next,
        {
            **_EXPERT_KEYS,
            **_LATENT_KEYS,
            "attention.head_count_kv": [1 if layer % 3 == 2 else 0 for layer in range(LAYERS)],
            "attention.key_length": _KV_RANK,
            "attention.key_length_mla": _NOPE,
            "rope.dimension_count": 0,
            "ssm.conv_kernel": 4,
            "kda.head_dim": HEAD_DIM,
            "kda.gate_lower_bound": -5.0,
            "attention.layer_norm_epsilon": 1e-6,
            "attention.indexer.head_count": _INDEX_HEADS,
            "attention.indexer.key_length": _INDEX_DIM,
            "attention.indexer.top_k": 64,
            "attention.indexer.kpool": _POOL,
            "attention.indexer.kpool_select_tail": True,
            "hyper_connection.count": _STREAMS,
            "hyper_connection.sinkhorn_iterations": 2,
            "hyper_connection.epsilon": 1e-6,
        },
        branch=1.7,
    ),
}
