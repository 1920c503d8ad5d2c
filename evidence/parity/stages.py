"""The reference drafter, stage by stage: each stage reads what llama.cpp's own previous stages gave.

The formulas are those of `dflash/model.py` (package `dflash` 0.1.0), the names of observed results those of
llama.cpp's graph (src/models/dflash.cpp). A result that was not observed (a view, or part of a fused operation) is
taken from the reference, and the next one that was observed answers for both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dflash2.evidence.parity.rounding import rounded
from dflash2.evidence.parity.weights import Weights


@dataclass(frozen=True)
class Computed:
    """One stage of one block: `name` and `layer` (None outside the layers), llama.cpp's result and the reference's.

    `tensors`: the weights that it uses.
    """

    name: str
    layer: int | None
    observed: Any
    value: Any
    tensors: tuple[str, ...]


@dataclass(frozen=True)
class Seen:
    """What llama.cpp computed for one block.

    Attributes:
        features: of every injected position, [P, taps * hidden size].
        injected, block: results by their names in the graphs, rows first.
        tokens: the block, [B]; it begins at position P.
        cache_type: of keys and values.
    """

    features: Any
    injected: Mapping[str, Any]
    block: Mapping[str, Any]
    tokens: Any
    cache_type: str


class Walk:
    """One pass over the stages of a block with the weights of one file.

    Attributes:
        hidden, logits: the rows that the selector reads, [B, hidden size] and [B, vocabulary]; set by `stages`.
    """

    hidden: Any
    logits: Any

    def __init__(self, weights: Weights, seen: Seen) -> None:
        self._weights, self._seen = weights, seen
        self._geometry = weights.geometry
        self._done: list[Computed] = []
        self._layer: int | None = None
        self._unseen: tuple[str, ...] = ()  # weights of stages before, for which the next observed one answers

    def stages(self) -> tuple[Computed, ...]:
        """All stages up to the logits, in the order of computation."""
        fused = self._inject()
        x = self._embed()
        for layer in range(self._geometry.layers):
            self._layer = layer
            x = self._feed_forward(self._attention(x, *self._context(fused, layer)))
        self._layer = None
        x = self._note("final norm", "result_norm", self._norm(x, "output_norm.weight"), "output_norm.weight")
        self.hidden, self.logits = x, self._logits(x)
        return tuple(self._done)

    def proposal(self) -> list[int]:
        """The tokens [B - 1] that the walk over the stages leads to; `stages` comes first."""
        hidden, logits = self.hidden[1:], self.logits[1:]
        k = self._geometry.top_k
        if not k:
            return [int(token) for token in logits.argmax(-1)]
        ids = logits.topk(k, -1).indices
        tokens, at = [], 0
        for row, scores in zip(ids, self.pair_scores(hidden, logits, ids), strict=True):
            at = int(scores[at].argmax())
            tokens.append(int(row[at]))
        return tokens

    def _note(self, name: str, key: str, value: Any, *tensors: str) -> Any:
        """Record the stage if its result was observed; what the next stage reads."""
        layered = key if self._layer is None else f"{key}-{self._layer}"
        source = self._seen.injected if layered in self._seen.injected else self._seen.block
        if layered not in source:
            self._unseen += tensors
            return value
        observed = source[layered].reshape(value.shape)
        self._done.append(Computed(name, self._layer, observed, value, (*self._unseen, *tensors)))
        self._unseen = ()
        return observed

    def _own(self, part: str) -> str:
        return f"blk.{self._layer}.{part}"

    def _norm(self, x: Any, name: str) -> Any:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self._geometry.eps)
        return x * scale * self._weights.vector(name)

    def _inject(self) -> Any:
        fused = self._norm(self._weights.product("fc.weight", self._seen.features), "enc.output_norm.weight")
        return self._note("fused features", "inp_g_embeddings", fused, "fc.weight", "enc.output_norm.weight")

    def _embed(self) -> Any:
        rows = self._weights.rows("token_embd.weight", self._seen.tokens) * self._geometry.embedding_scale
        return self._note("embeddings", "inp_noise_embd", rows, "token_embd.weight")

    def _context(self, fused: Any, layer: int) -> tuple[Any, Any]:
        """Keys and values [P, heads, head size] of the injected positions."""
        self._layer = layer
        keys = self._keys(fused, torch.arange(len(fused)))
        keys = self._note("injected keys", "Kcur_injected", keys, *self._key_tensors())
        return keys, self._values(fused, "Vcur_injected", "injected values")

    def _key_tensors(self) -> tuple[str, ...]:
        return self._own("attn_k.weight"), self._own("attn_k_norm.weight")

    def _keys(self, x: Any, positions: Any) -> Any:
        keys = self._weights.product(self._own("attn_k.weight"), x).unflatten(-1, (self._geometry.kv_heads, -1))
        return self._rope(self._norm(keys, self._own("attn_k_norm.weight")), positions)

    def _values(self, x: Any, key: str, name: str) -> Any:
        tensor = self._own("attn_v.weight")
        values = self._weights.product(tensor, x).unflatten(-1, (self._geometry.kv_heads, -1))
        values, self._unseen = self._note(name, key, values, tensor), ()  # "attention" answers for them
        return values

    def _rope(self, x: Any, positions: Any) -> Any:
        """Rotate halves of the first `rope_dim` of `x` [n, heads, head size]."""
        half = self._geometry.rope_dim // 2
        frequencies = self._geometry.rope_base ** -(torch.arange(half, dtype=torch.float64) / half)
        angles = (positions[:, None] * frequencies)[:, None]
        first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)

    def _attention(self, x: Any, context_keys: Any, context_values: Any) -> Any:
        """The attention sublayer on `x` [B, hidden size], its residual included."""
        y = self._normed("attention norm", "noise_norm", x, "attn_norm.weight")
        y, kernels = self._conv_in(y, "attn")
        positions = len(context_keys) + torch.arange(len(x))
        q_tensors = self._own("attn_q.weight"), self._own("attn_q_norm.weight")
        queries = self._weights.product(q_tensors[0], y).unflatten(-1, (self._geometry.heads, -1))
        queries = self._rope(self._norm(queries, q_tensors[1]), positions)
        queries = self._note("queries", "Qcur", queries, *q_tensors)
        keys = self._note("keys", "Kcur", self._keys(y, positions), *self._key_tensors())
        values = self._values(y, "Vcur", "values")
        mixed = self._attend(queries, torch.cat([context_keys, keys]), torch.cat([context_values, values]))
        mixed = self._note("attention", "kqv_out", mixed, self._own("attn_v.weight"))
        tensor = self._own("attn_output.weight")
        y = self._note("attention output", "attn_out", self._weights.product(tensor, mixed), tensor)
        y = self._conv_out(y, kernels, "attn")
        return self._note("attention residual", "ffn_inp", x + y, tensor)

    def _normed(self, name: str, key: str, x: Any, part: str) -> Any:
        tensor = self._own(part)
        return self._note(name, key, self._norm(x, tensor), tensor)

    def _attend(self, queries: Any, keys: Any, values: Any) -> Any:
        """Attention [B, heads * head size] of the block's queries over all keys, grouped heads."""
        geometry, repeat = self._geometry, self._geometry.heads // self._geometry.kv_heads
        if self._weights.rounding:
            queries, keys, values = (rounded(one, self._seen.cache_type) for one in (queries, keys, values))
        keys, values = (one.repeat_interleave(repeat, 1) for one in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * geometry.attention_scale
        weights = scores.masked_fill(~self._visible(len(queries), len(keys)), -torch.inf).softmax(-1)
        if self._weights.rounding:
            weights = weights.to(torch.float32 if self._seen.cache_type == "F32" else torch.float16).double()
        return torch.einsum("hqk,khd->qhd", weights, values).flatten(1)

    def _visible(self, n_queries: int, n_keys: int) -> Any:
        """Which keys each row of the block sees (`_attention_mask` of the reference), [B, keys]."""
        assert self._layer is not None
        q = torch.arange(n_keys - n_queries, n_keys)[:, None]
        k = torch.arange(n_keys)
        visible = torch.ones(n_queries, n_keys, dtype=torch.bool)
        if self._geometry.causal[self._layer]:
            visible &= k <= q
        if self._geometry.sliding[self._layer]:
            visible &= (q - k < self._geometry.window) & (k - q < self._geometry.window)
        return visible

    def _conv_in(self, x: Any, part: str) -> tuple[Any, Any]:
        """The convolved input of a sublayer, and the kernels of both sides [B, 2, taps, hidden size]."""
        base, projection = self._own(f"{part}_conv_base"), self._own(f"{part}_conv_proj.weight")
        if not self._weights.has(base):
            return x, None
        delta = self._weights.product(projection, x).unflatten(-1, (2, self._geometry.taps, -1))
        kernels = self._weights.vector(base) + delta.repeat_interleave(self._geometry.group, -1)
        name = "attention conv in" if part == "attn" else "ffn conv in"
        return self._note(name, f"{part}_conv_in", _convolve(x, kernels[:, 0]), base, projection), kernels

    def _conv_out(self, x: Any, kernels: Any, part: str) -> Any:
        if kernels is None:
            return x
        name, through = ("attention conv out", "attn_output") if part == "attn" else ("ffn conv out", "ffn_down")
        tensors = (f"{part}_conv_base", f"{part}_conv_proj.weight", f"{through}.weight")
        return self._note(name, f"{part}_conv_out", _convolve(x, kernels[:, 1]), *map(self._own, tensors))

    def _feed_forward(self, x: Any) -> Any:
        """The feed-forward sublayer on `x` [B, hidden size], its residual included: the layer's output."""
        y = self._normed("ffn norm", "ffn_norm", x, "ffn_norm.weight")
        y, kernels = self._conv_in(y, "ffn")
        gate, up, down = (self._own(f"ffn_{part}.weight") for part in ("gate", "up", "down"))
        y = torch.nn.functional.silu(self._weights.product(gate, y)) * self._weights.product(up, y)
        y = self._note("ffn", "ffn_out", self._weights.product(down, y), gate, up, down)
        y = self._conv_out(y, kernels, "ffn")
        return self._note("layer output", "l_out", x + y)

    def _logits(self, x: Any) -> Any:
        logits = self._weights.product("output.weight", x) * self._geometry.output_scale
        if self._geometry.softcap:
            logits = torch.tanh(logits / self._geometry.softcap) * self._geometry.softcap
        return self._note("logits", "result_output", logits, "output.weight")

    def pair_scores(self, hidden: Any, logits: Any, ids: Any) -> Any:
        """S(a, b) [n, K, K] of candidates `ids` [n, K], given `hidden` [n, hidden size] and `logits` [n, vocabulary].

        The first row's predecessor is the anchor, K times (`CandidateSelector.select`).
        """
        anchor = self._seen.tokens[:1].expand(ids.shape[1])
        before = torch.cat([anchor[None], ids[:-1]])
        gate = self._weights.product("selector_hidden.weight", hidden)
        predecessors = self._weights.rows("selector_predecessor.weight", before)
        successors = self._weights.rows("selector_successor.weight", ids)
        scores = torch.einsum("nar,nr,nbr->nab", predecessors, gate, successors)
        return scores + logits.gather(-1, ids)[:, None]


def _convolve(x: Any, kernels: Any) -> Any:
    """Causal convolution of `x` [B, hidden size] with a kernel per row, `kernels` [B, taps, hidden size]."""
    out = torch.zeros_like(x)
    for tap in range(kernels.shape[1]):
        if tap < len(x):
            out[tap:] += kernels[tap:, tap] * x[: len(x) - tap]
    return out
