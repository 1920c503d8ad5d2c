"""The demo target: a small qwen3 trained on the corpus, and its own continuations as drafter data."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

Log = Callable[[str], None]
# Half the memory traffic of float32; the weights themselves stay float32.
ACTIVATIONS = torch.bfloat16


@dataclass(frozen=True)
class TransformerShape:
    """Geometry shared by target and drafter (qwen3: QK-norm, rotate-half RoPE, SwiGLU)."""

    vocab_size: int = 384
    hidden_size: int = 288
    layers: int = 6
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 64
    ffn_size: int = 768
    rope_theta: float = 10000.0
    rms_eps: float = 1e-6
    context_length: int = 512


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return (y * self.weight).to(x.dtype)


class RotaryEmbedding(nn.Module):
    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        half = torch.arange(0, shape.head_dim, 2).float() / shape.head_dim
        angles = torch.outer(torch.arange(4 * shape.context_length).float(), shape.rope_theta**-half)
        self.register_buffer("cos", torch.cat([angles, angles], -1).cos(), persistent=False)
        self.register_buffer("sin", torch.cat([angles, angles], -1).sin(), persistent=False)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotate `x` `[B, heads, T, head_dim]` at `positions` `[T]` or `[B, T]`."""
        cos, sin = self.cos[positions], self.sin[positions]
        if positions.dim() == 2:
            cos, sin = cos[:, None], sin[:, None]
        first, second = x.float().chunk(2, -1)
        return (x.float() * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.shape = shape
        d, hd = shape.hidden_size, shape.head_dim
        self.q_proj = nn.Linear(d, shape.heads * hd, bias=False)
        self.k_proj = nn.Linear(d, shape.kv_heads * hd, bias=False)
        self.v_proj = nn.Linear(d, shape.kv_heads * hd, bias=False)
        self.o_proj = nn.Linear(shape.heads * hd, d, bias=False)
        self.q_norm = RMSNorm(hd, shape.rms_eps)
        self.k_norm = RMSNorm(hd, shape.rms_eps)

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape[:2], -1, self.shape.head_dim)

    def queries(self, x: torch.Tensor, rope: RotaryEmbedding, positions: torch.Tensor) -> torch.Tensor:
        return rope(self.q_norm(self._split(self.q_proj(x))).transpose(1, 2), positions)

    def keys_values(
        self, x: torch.Tensor, rope: RotaryEmbedding, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        k = rope(self.k_norm(self._split(self.k_proj(x))).transpose(1, 2), positions)
        return k, self._split(self.v_proj(x)).transpose(1, 2)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attend `q` `[B, heads, T, hd]` to `k`, `v` `[B, kv_heads, S, hd]` where `visible` (broadcast to `[B, T, S]`).

        Written out where there is a backward pass: torch's CPU flash attention spends more there than all else does.
        """
        rows, heads, length, size = q.shape
        kv = self.shape.kv_heads
        if length == 1:
            out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
            return self.o_proj(out.reshape(rows, 1, -1))
        q = q.reshape(rows, kv, heads // kv * length, size)
        scores = (q @ k.transpose(-1, -2)) * size**-0.5
        if visible is not None:
            scores = scores.view(rows, kv, heads // kv, length, -1)
            scores = scores.masked_fill(~visible[:, None, None], -1e9).flatten(2, 3)
        out = scores.float().softmax(-1).to(v.dtype) @ v
        out = out.view(rows, heads, length, size).transpose(1, 2).reshape(rows, length, -1)
        return self.o_proj(out)


class MLP(nn.Module):
    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.ffn_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.ffn_size, bias=False)
        self.down_proj = nn.Linear(shape.ffn_size, shape.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class TargetLayer(nn.Module):
    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_eps)
        self.mlp = MLP(shape)

    def forward(
        self, x: torch.Tensor, rope: RotaryEmbedding, positions: torch.Tensor, visible: torch.Tensor
    ) -> torch.Tensor:
        y = self.input_layernorm(x)
        k, v = self.self_attn.keys_values(y, rope, positions)
        x = x + self.self_attn.attend(self.self_attn.queries(y, rope, positions), k, v, visible)
        return x + self.mlp(self.post_attention_layernorm(x))


class Target(nn.Module):
    """Qwen3 with tied embedding; parameter names are Hugging Face's without the `model.` prefix."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList([TargetLayer(shape) for _ in range(shape.layers)])
        self.norm = RMSNorm(shape.hidden_size, shape.rms_eps)
        self.rope = RotaryEmbedding(shape)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * shape.layers) if residual else 0.02)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the normed final state `[B, T, D]` and the output of every layer (tap id = list index)."""
        positions = torch.arange(tokens.shape[1])
        visible = (positions[:, None] >= positions[None, :])[None]
        x = self.embed_tokens(tokens).to(ACTIVATIONS)
        outputs = []
        for layer in self.layers:
            x = layer(x, self.rope, positions, visible)
            outputs.append(x)
        return self.norm(x), outputs

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self.embed_tokens.weight.to(hidden.dtype))


def make_optimizers(
    model: nn.Module, matrix_lr: float, other_lr: float
) -> tuple[list[torch.optim.Optimizer], Callable[[float], None]]:
    """Muon for hidden matrices, AdamW for embeddings, norms and kernels; returns them and a learning-rate scaler."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    table = [p for n, p in named if p.dim() != 2 or "embed" in n or "codebook" in n]
    matrices = [p for n, p in named if p.dim() == 2 and not ("embed" in n or "codebook" in n)]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=matrix_lr, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(table, lr=other_lr, betas=(0.9, 0.97), weight_decay=0.0),
    ]
    base = [matrix_lr, other_lr]

    def scale(factor: float) -> None:
        for optimizer, lr in zip(optimizers, base, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = lr * factor

    return optimizers, scale


def schedule(step: int, steps: int, warmup: int = 50, decay: float = 0.5) -> float:
    """Warm up, hold, then fall linearly to zero over the last `decay` of the steps."""
    if step < warmup:
        return (step + 1) / warmup
    return min(1.0, (steps - step) / (decay * steps))


@dataclass(frozen=True)
class Phase:
    """One stretch of target training: `steps` of `rows` windows of `length` tokens."""

    steps: int
    rows: int
    length: int


def train_target(shape: TransformerShape, tokens: np.ndarray, phases: tuple[Phase, ...], seed: int, log: Log) -> Target:
    """Train the target for next-token prediction; the phases share one learning-rate schedule."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    model = Target(shape)
    optimizers, scale = make_optimizers(model, matrix_lr=4e-3, other_lr=4e-3)

    @torch.compile(dynamic=False)
    def loss_of(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", ACTIVATIONS):
            logits = model.head(model(inputs)[0])
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())

    total, step, seen, running, begin = sum(p.steps for p in phases), 0, 0, 0.0, time.perf_counter()
    for phase in phases:
        for _ in range(phase.steps):
            starts = rng.integers(0, len(tokens) - phase.length - 1, phase.rows)
            windows = np.stack([tokens[s : s + phase.length + 1] for s in starts])
            batch = torch.from_numpy(windows.astype(np.int64))
            scale(schedule(step, total))
            loss = loss_of(batch[:, :-1], batch[:, 1:])
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            running = loss.item() if step == 0 else 0.95 * running + 0.05 * loss.item()
            step, seen = step + 1, seen + batch[:, 1:].numel()
            if step % 20 == 0 or step == total:
                speed = seen / (time.perf_counter() - begin)
                log(f"target step {step}/{total} loss {running:.4f} {speed:,.0f} tokens/s")
    return model.eval()


@torch.inference_mode()
def continue_prompts(
    model: Target, prompts: torch.Tensor, new_tokens: int, temperatures: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """Continue equally long `prompts` `[B, P]` by `new_tokens`, row b at `temperatures[b]` (0 = greedy)."""
    shape, (rows, prompt_length) = model.shape, prompts.shape
    total = prompt_length + new_tokens
    caches = [torch.zeros(2, rows, shape.kv_heads, total, shape.head_dim, dtype=ACTIVATIONS) for _ in model.layers]
    tokens = torch.empty(rows, total, dtype=torch.long)
    tokens[:, :prompt_length] = prompts
    sampled = (temperatures > 0)[:, None]
    scale = torch.where(temperatures > 0, temperatures, 1.0)[:, None]
    begin = 0
    with torch.autocast("cpu", ACTIVATIONS):
        for end in range(prompt_length, total):
            positions = torch.arange(begin, end)
            x = model.embed_tokens(tokens[:, begin:end]).to(ACTIVATIONS)
            visible = (positions[:, None] >= positions[None, :])[None] if begin == 0 else None
            for layer, cache in zip(model.layers, caches, strict=True):
                y = layer.input_layernorm(x)
                k, v = layer.self_attn.keys_values(y, model.rope, positions)
                cache[0, :, :, begin:end], cache[1, :, :, begin:end] = k, v
                q = layer.self_attn.queries(y, model.rope, positions)
                x = x + layer.self_attn.attend(q, cache[0, :, :, :end], cache[1, :, :, :end], visible)
                x = x + layer.mlp(layer.post_attention_layernorm(x))
            logits = model.head(model.norm(x[:, -1])).float() / scale
            noise = -torch.empty_like(logits).exponential_(generator=generator).log()
            tokens[:, end] = torch.where(sampled, logits + noise, logits).argmax(-1)
            begin = end
    return tokens


def own_continuations(
    model: Target,
    tokens: np.ndarray,
    rows: int,
    row_tokens: int,
    prompt_range: tuple[int, int],
    temperatures: tuple[float, ...],
    seed: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Sample what the drafter will be asked to predict: the target's continuations of training text.

    All prompts of one call are equally long. Returns token rows int16 `[rows, row_tokens]` and the prompt length of
    each row `[rows]`.
    """
    rng = np.random.default_rng(seed)
    length = int(rng.integers(prompt_range[0], prompt_range[1] + 1))
    starts = rng.integers(0, len(tokens) - length, rows)
    prompts = torch.from_numpy(np.stack([tokens[s : s + length] for s in starts]).astype(np.int64))
    row_temperatures = torch.tensor([temperatures[i % len(temperatures)] for i in range(rows)])
    generator = torch.Generator().manual_seed(seed)
    grown = continue_prompts(model, prompts, row_tokens - length, row_temperatures, generator)
    return grown.numpy().astype(np.int16), np.full(rows, length)
