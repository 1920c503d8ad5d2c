"""The drafter in plain PyTorch, one switch per dialect: what every GGUF is compared with.

Written from the formulas, not from our converter: it reads a checkpoint's tensors under z-lab's names and a `Rules`
that the test states itself. tests/test_plain_drafter.py holds it against the packages that define the dialects.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch.nn import functional as F

ACTIVATIONS = {"silu": F.silu, "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh")}


@dataclass(frozen=True)
class Rules:
    """What a drafter does besides its weights; `causal[i]` and `window[i]` belong to layer i (None: no window).

    `frequencies` [rotated / 2] stand for those of `theta` where a rope is scaled; `rope_factor` multiplies cos and sin.
    `head_rows` are the target ids of an own head's rows (None: the head covers the vocabulary).
    """

    heads: int
    kv_heads: int
    head_dim: int
    taps: tuple[int, ...]
    block: int
    mask_token: int
    causal: tuple[bool, ...]
    window: tuple[int | None, ...]
    theta: float = 10000.0
    eps: float = 1e-6
    rotated: int | None = None
    frequencies: torch.Tensor | None = field(default=None, repr=False)
    rope_factor: float = 1.0
    value_scale: float = 1.0
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None
    activation: str = "silu"
    top_k: int = 0
    head_rows: tuple[int, ...] | None = None
    mask_embedding: torch.Tensor | None = field(default=None, repr=False)


class PlainDrafter:
    """Rows and proposals of one drafter; `weights` are F32 tensors under z-lab's names."""

    def __init__(self, rules: Rules, weights: Mapping[str, torch.Tensor]) -> None:
        self.rules, self.weights = rules, weights

    @torch.inference_mode()
    def rows(self, features: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
        """Final-norm rows [B, D] of a block that follows `features` [N, K*D]; `embeddings` [B, D] are its tokens'."""
        rules = self.rules
        context = self._norm(features @ self.weights["fc.weight"].T, "hidden_norm")
        hidden = embeddings * rules.embedding_scale
        for layer in range(len(rules.causal)):
            hidden = self._sublayer(layer, "input_layernorm", "attention_conv", hidden, self._attention(layer, context))
            hidden = self._sublayer(layer, "post_attention_layernorm", "mlp_conv", hidden, self._mlp(layer))
        return self._norm(hidden, "norm")

    @torch.inference_mode()
    def propose(self, rows: torch.Tensor, anchor: int, head: torch.Tensor) -> list[int]:
        """Tokens drafted from `rows` [B-1, D] by `head` [V, D]."""
        logits = self.logits(rows, head)
        if not self.rules.top_k:
            return logits.argmax(-1).tolist()
        return self._walk(rows, logits, anchor)

    @torch.inference_mode()
    def logits(self, rows: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        """Logits over the target's vocabulary; -inf where a reduced head has no row."""
        rules = self.rules
        logits = rows @ self.weights.get("lm_head.weight", head).T * rules.logit_scale
        if rules.softcap:
            logits = torch.tanh(logits / rules.softcap) * rules.softcap
        if rules.head_rows is None:
            return logits
        whole = torch.full((len(rows), len(head)), -math.inf)
        whole[:, list(rules.head_rows)] = logits
        return whole

    def _walk(self, rows, logits, anchor):
        unary, candidates = logits.topk(self.rules.top_k)
        gates = rows @ self._named("candidate_selector.hidden_projection.weight").T
        predecessors = self._named("candidate_selector.predecessor_codebook")
        successors = self._named("candidate_selector.successor_codebook")
        path, before = [], anchor
        for row in range(len(rows)):
            scores = unary[row] + successors[candidates[row]] @ (predecessors[before] * gates[row])
            before = int(candidates[row, scores.argmax()])
            path.append(before)
        return path

    def _sublayer(self, layer, norm, convolution, hidden, function):
        normed = self._norm(hidden, f"layers.{layer}.{norm}")
        name = f"layers.{layer}.{convolution}"
        if f"{name}.base_kernel" not in self.weights:
            return hidden + function(normed)
        base = self._named(f"{name}.base_kernel")
        dynamic = normed @ self._named(f"{name}.kernel_projection.weight").T
        dynamic = dynamic.view(len(normed), 2, base.shape[1], -1)
        inner = function(_convolve(normed, dynamic[:, 0], base[0]))
        return hidden + _convolve(inner, dynamic[:, 1], base[1])

    def _attention(self, layer, context):
        rules = self.rules
        prefix = f"layers.{layer}.self_attn."

        def project(x, name, heads):
            out = x @ self._named(f"{prefix}{name}_proj.weight").T
            bias = self.weights.get(f"{prefix}{name}_proj.bias")
            return (out if bias is None else out + bias).view(len(x), heads, -1) if heads else out

        def attend(x):
            start = len(context)
            keys_in = torch.cat([context, x])
            q = self._norm(project(x, "q", rules.heads), prefix + "q_norm")
            k = self._norm(project(keys_in, "k", rules.kv_heads), prefix + "k_norm")
            v = project(keys_in, "v", rules.kv_heads) * rules.value_scale
            q = self._rope(q, torch.arange(start, start + len(x)))
            k = self._rope(k, torch.arange(start + len(x)))
            groups = rules.heads // rules.kv_heads
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
            scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(rules.head_dim)
            scores = scores.masked_fill(~self._visible(layer, len(x), start), -math.inf)
            sinks = self.weights.get(prefix + "attention_sink_bias")
            if sinks is not None:
                scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(x), 1)], -1)
            shares = scores.softmax(-1)[:, :, : start + len(x)]
            mixed = torch.einsum("hqk,khd->qhd", shares, v).reshape(len(x), -1)
            out = project(mixed, "o", 0)
            bias = self.weights.get(prefix + "o_proj.bias")
            return out if bias is None else out + bias

        return attend

    def _visible(self, layer, n, start):
        distance = torch.arange(start, start + n)[:, None] - torch.arange(start + n)[None]
        visible = torch.ones_like(distance, dtype=torch.bool)
        if self.rules.causal[layer]:
            visible &= distance >= 0
        window = self.rules.window[layer]
        if window is not None:
            visible &= distance.abs() < window
        return visible

    def _rope(self, x, positions):
        rotated = self.rules.rotated or self.rules.head_dim
        frequencies = self.rules.frequencies
        if frequencies is None:
            frequencies = self.rules.theta ** (-torch.arange(0, rotated, 2) / rotated)
        angles = (positions[:, None] * frequencies)[:, None]
        first, second, rest = x[..., : rotated // 2], x[..., rotated // 2 : rotated], x[..., rotated:]
        cos, sin = angles.cos() * self.rules.rope_factor, angles.sin() * self.rules.rope_factor
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)

    def _mlp(self, layer):
        gate, up, down = (self._named(f"layers.{layer}.mlp.{part}_proj.weight") for part in ("gate", "up", "down"))
        activate = ACTIVATIONS[self.rules.activation]
        return lambda x: (activate(x @ gate.T) * (x @ up.T)) @ down.T

    def _norm(self, x, name):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.rules.eps) * self._named(f"{name}.weight")

    def _named(self, name):
        return self.weights[name]


def _convolve(x, dynamic, base):
    """Taps 0.. of a causal grouped convolution over the rows of one block."""
    group = x.shape[1] // dynamic.shape[-1]
    total = torch.zeros_like(x)
    for tap in range(len(base)):
        shifted = F.pad(x, (0, 0, tap, 0))[: len(x)]
        total = total + (base[tap] + dynamic[:, tap].repeat_interleave(group, 1)) * shifted
    return total
