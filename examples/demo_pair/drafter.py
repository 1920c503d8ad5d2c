"""The demo drafters: DFlash (v1) and DFlash 2, trained on the target's own continuations.

The layer follows the reference package `dflash` 0.1.0: queries from the block alone, keys and values from the injected
target features and the block. Training opens a block at every eighth position of a row at once: each sees the injected
positions before its anchor (inside the window) and itself, so that keys are shared by shifted slices, not gathered.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
from corpus import MASK_ID
from target import (
    ACTIVATIONS,
    MLP,
    Attention,
    Log,
    RMSNorm,
    RotaryEmbedding,
    Target,
    TransformerShape,
    make_optimizers,
    schedule,
)
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True)
class DrafterShape:
    """What a drafter adds to its transformer; `conv` and `selector` are the whole of DFlash 2."""

    transformer: TransformerShape
    target_layer_ids: tuple[int, ...] = (0, 2, 4)
    block_size: int = 8
    window: int = 64
    conv_kernel_size: int = 2
    conv_group_size: int = 16
    selector_rank: int = 64
    selector_top_k: int = 16
    is_v2: bool = True


class GroupedDynamicCausalConv(nn.Module):
    """Two-tap convolution inside a block, on both sides of a sublayer (facts: `base + delta(x)` per tap and group)."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.taps, self.group = shape.conv_kernel_size, shape.conv_group_size
        size = shape.transformer.hidden_size
        base = torch.zeros(2, self.taps, size)
        base[:, 0] = 1.0
        self.base_kernel = nn.Parameter(base)
        self.kernel_projection = nn.Linear(size, 2 * self.taps * (size // self.group), bias=False)
        nn.init.zeros_(self.kernel_projection.weight)

    def kernels(self, x: torch.Tensor) -> torch.Tensor:
        """Return both sides' kernels for `x` `[B, A, K, D]`: `[B, A, K, 2, taps, D]`."""
        delta = self.kernel_projection(x).view(*x.shape[:-1], 2, self.taps, -1)
        return self.base_kernel.to(x.dtype) + delta.repeat_interleave(self.group, -1)

    def apply_side(self, x: torch.Tensor, kernels: torch.Tensor, side: int) -> torch.Tensor:
        out = kernels[..., side, 0, :] * x
        for tap in range(1, self.taps):
            out = out + kernels[..., side, tap, :] * F.pad(x[:, :, :-tap], (0, 0, tap, 0))
        return out


class DrafterLayer(nn.Module):
    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        transformer = shape.transformer
        self.input_layernorm = RMSNorm(transformer.hidden_size, transformer.rms_eps)
        self.self_attn = Attention(transformer)
        self.post_attention_layernorm = RMSNorm(transformer.hidden_size, transformer.rms_eps)
        self.mlp = MLP(transformer)
        if shape.is_v2:
            self.attention_conv = GroupedDynamicCausalConv(shape)
            self.mlp_conv = GroupedDynamicCausalConv(shape)
        self.is_v2 = shape.is_v2

    def forward(
        self, x: torch.Tensor, features: torch.Tensor, rope: RotaryEmbedding, first: int, visible: torch.Tensor
    ) -> torch.Tensor:
        """Advance blocks `x` `[B, A, K, D]` that begin at position `first` over `features` `[B, S, D]`.

        `visible` `[A, K, window + K]` says which of its window and its block a row sees.
        """
        y = self.input_layernorm(x)
        if self.is_v2:
            kernels = self.attention_conv.kernels(y)
            y = self.attention_conv.apply_side(y, kernels, 0)
        y = self.attend_blocks(y, features, rope, first, visible)
        x = x + (self.attention_conv.apply_side(y, kernels, 1) if self.is_v2 else y)
        y = self.post_attention_layernorm(x)
        if self.is_v2:
            kernels = self.mlp_conv.kernels(y)
            y = self.mlp_conv.apply_side(y, kernels, 0)
        y = self.mlp(y)
        return x + (self.mlp_conv.apply_side(y, kernels, 1) if self.is_v2 else y)

    def attend_blocks(
        self, x: torch.Tensor, features: torch.Tensor, rope: RotaryEmbedding, first: int, visible: torch.Tensor
    ) -> torch.Tensor:
        rows, count, block, size = x.shape
        window, head_dim = visible.shape[-1] - block, self.self_attn.shape.head_dim
        flat = x.reshape(rows, count * block, size)
        positions = first + torch.arange(count * block)
        q = self.self_attn.queries(flat, rope, positions)
        own = self.self_attn.keys_values(flat, rope, positions)
        # Position `first - window` is the first that any block sees; before position 0 stand zeros, never visible.
        begin = first - window
        seen = features[:, max(begin, 0) : begin + window + count * block]
        context = self.self_attn.keys_values(seen, rope, torch.arange(max(begin, 0), max(begin, 0) + seen.shape[1]))
        joined = []
        for mine, theirs in zip(own, context, strict=True):
            length = window + count * block
            before = max(-begin, 0)
            padded = F.pad(theirs, (0, 0, before, length - before - theirs.shape[2]))
            blocks = padded.reshape(rows, -1, length // block, block, head_dim)
            slices = [blocks[:, :, i : i + count] for i in range(window // block)]
            joined.append(torch.cat([*slices, mine.view(rows, -1, count, block, head_dim)], 3))
        k, v = (t.permute(0, 2, 1, 3, 4).flatten(0, 1) for t in joined)
        q = q.view(rows, -1, count, block, head_dim).permute(0, 2, 1, 3, 4).flatten(0, 1)
        visible = visible.expand(rows, -1, -1, -1).flatten(0, 1)
        return self.self_attn.attend(q, k, v, visible).view_as(x)


class CandidateSelector(nn.Module):
    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        transformer = shape.transformer
        self.top_k = shape.selector_top_k
        self.predecessor_codebook = nn.Parameter(torch.randn(transformer.vocab_size, shape.selector_rank) * 0.3)
        self.successor_codebook = nn.Parameter(torch.randn(transformer.vocab_size, shape.selector_rank) * 0.3)
        self.hidden_projection = nn.Linear(transformer.hidden_size, shape.selector_rank, bias=False)
        nn.init.zeros_(self.hidden_projection.weight)

    def scores(
        self, hidden: torch.Tensor, unary: torch.Tensor, candidates: torch.Tensor, predecessors: torch.Tensor
    ) -> torch.Tensor:
        """Score `candidates` `[..., K]` after `predecessors` `[...]`: `unary + <pred * proj(h), succ>` `[..., K]`."""
        query = self.predecessor_codebook[predecessors] * self.hidden_projection(hidden).float()
        return unary + (query[..., None, :] * self.successor_codebook[candidates]).sum(-1)


class Drafter(nn.Module):
    """A drafter of either kind; parameter names are those of the published checkpoints."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        transformer = shape.transformer
        self.shape = shape
        self.fc = nn.Linear(len(shape.target_layer_ids) * transformer.hidden_size, transformer.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(transformer.hidden_size, transformer.rms_eps)
        self.layers = nn.ModuleList([DrafterLayer(shape) for _ in range(transformer.layers)])
        self.norm = RMSNorm(transformer.hidden_size, transformer.rms_eps)
        self.rope = RotaryEmbedding(transformer)
        if shape.is_v2:
            self.candidate_selector = CandidateSelector(shape)

    @torch.no_grad()
    def start_from(self, target: Target) -> None:
        """Begin as the target's last layers over its last tap, which is near what the drafter has to become."""
        first = len(target.layers) - len(self.layers)
        for layer, source in zip(self.layers, target.layers[first:], strict=True):
            layer.load_state_dict(source.state_dict(), strict=False)
        self.norm.load_state_dict(target.norm.state_dict())
        self.hidden_norm.load_state_dict(target.layers[-1].input_layernorm.state_dict())
        size = self.fc.out_features
        self.fc.weight.normal_(std=0.002)
        self.fc.weight[:, -size:] += torch.eye(size)

    def forward(self, taps: torch.Tensor, noise: torch.Tensor, first: int) -> torch.Tensor:
        """Return final-norm states `[B, A, block, D]` of consecutive blocks, the first opened at position `first`.

        `taps` `[B, S, n*D]` are the tapped target layers' outputs, `noise` `[B, A, block, D]` the embedded blocks.
        """
        count, block, window = noise.shape[1], noise.shape[2], self.shape.window
        features = self.hidden_norm(self.fc(taps))
        row, key = torch.arange(block)[:, None], torch.arange(window + block)
        in_window = key > row  # key 0 stands `window` positions before the block
        exists = first + block * torch.arange(count)[:, None] - window + key >= 0
        visible = in_window[None] & exists[:, None]
        x = noise
        for layer in self.layers:
            x = layer(x, features, self.rope, first, visible)
        return self.norm(x)


def open_blocks(target: Target, tokens: torch.Tensor, first: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut `tokens` `[B, T]` from `first` into blocks: noise embeddings `[B, A, block, D]`, ids `[B, A, block]`."""
    count = (tokens.shape[1] - first) // block
    ids = tokens[:, first : first + count * block].reshape(len(tokens), count, block)
    noise_ids = torch.full_like(ids, MASK_ID)
    noise_ids[..., 0] = ids[..., 0]
    return target.embed_tokens(noise_ids).to(ACTIVATIONS), ids


def drafter_loss(
    drafter: Drafter,
    target: Target,
    taps: torch.Tensor,
    noise: torch.Tensor,
    ids: torch.Tensor,
    valid: torch.Tensor,
    first: int,
) -> torch.Tensor:
    """Cross-entropy of every drafted position, decaying along the block, plus the selector's over its top-K.

    `valid` `[B, A]` picks the blocks that count.
    """
    with torch.autocast("cpu", ACTIVATIONS):
        hidden = drafter(taps, noise, first)[:, :, 1:]
        logits = target.head(hidden).float()
    labels = ids[..., 1:]
    weights = torch.exp(-torch.arange(labels.shape[-1]) / 4.0)
    weights = valid[..., None] * weights / (weights.sum() * valid.sum())
    unary = F.cross_entropy(logits.flatten(0, 2), labels.flatten(), reduction="none").view_as(labels)
    loss = (unary * weights).sum()
    if drafter.shape.is_v2:
        selector = drafter.candidate_selector
        candidates = logits.detach().topk(selector.top_k, -1).indices
        with torch.autocast("cpu", ACTIVATIONS):
            scores = selector.scores(hidden, logits.gather(-1, candidates), candidates, ids[..., :-1])
        hit = candidates == labels[..., None]
        chosen = scores.log_softmax(-1).masked_fill(~hit, 0.0).sum(-1)
        loss = loss - (chosen * weights).sum()
    return loss


@dataclass(frozen=True)
class DrafterData:
    """Token rows int16 `[N, T]`, the part `[begin, end)` of each that counts `[N, 2]`, tapped states `[N, T, n*D]`."""

    rows: np.ndarray
    spans: np.ndarray
    taps: torch.Tensor


@torch.inference_mode()
def tap_target(target: Target, layer_ids: tuple[int, ...], rows: np.ndarray, batch: int = 32) -> torch.Tensor:
    """Return the outputs of the tapped layers for token `rows` `[N, T]`, once for a whole training: `[N, T, n*D]`."""

    @torch.compile(dynamic=False)
    def outputs_of(tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", ACTIVATIONS):
            outputs = target(tokens)[1]
        return torch.cat([outputs[i] for i in layer_ids], -1)

    taps = torch.empty(*rows.shape, len(layer_ids) * target.shape.hidden_size, dtype=ACTIVATIONS)
    for begin in range(0, len(rows), batch):
        index = np.arange(begin, begin + batch) % len(rows)
        part = outputs_of(torch.from_numpy(rows[index].astype(np.int64)))
        taps[begin : begin + batch] = part[: len(rows) - begin]
    return taps


def train_drafter(
    shape: DrafterShape, target: Target, data: DrafterData, steps: int, batch: int, seed: int, log: Log
) -> Drafter:
    """Train a drafter; v1 and v2 see the same blocks in the same order at the same seed."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    drafter = Drafter(shape)
    drafter.start_from(target)
    optimizers, scale = make_optimizers(drafter, matrix_lr=6e-3, other_lr=3e-3)
    target.requires_grad_(False)
    loss_of = torch.compile(drafter_loss, dynamic=False)
    name, running, begin = "v2" if shape.is_v2 else "v1", 0.0, time.perf_counter()
    block = shape.block_size
    for step in range(steps):
        index = np.sort(rng.choice(len(data.rows), batch, replace=False))
        # The rows are shifted, not the blocks: one compiled graph serves every offset.
        shift = int(rng.integers(block))
        length = data.rows.shape[1] - block
        tokens = torch.from_numpy(data.rows[index, shift : shift + length].astype(np.int64))
        taps = data.taps[torch.from_numpy(index), shift : shift + length]
        noise, ids = open_blocks(target, tokens, block, block)
        starts = shift + block * (1 + np.arange(ids.shape[1]))
        spans = data.spans[index]
        valid = torch.from_numpy((starts >= spans[:, :1]) & (starts + block <= spans[:, 1:])).float()
        scale(schedule(step, steps))
        loss = loss_of(drafter, target, taps, noise, ids, valid, block)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        running = loss.item() if step == 0 else 0.95 * running + 0.05 * loss.item()
        if step % 20 == 19 or step == steps - 1:
            speed = (step + 1) / (time.perf_counter() - begin)
            log(f"drafter {name} step {step + 1}/{steps} loss {running:.4f} {speed:.2f} steps/s")
    return drafter.eval()


@torch.inference_mode()
def accepted_lengths(drafter: Drafter, target: Target, row: torch.Tensor, prompt_length: int) -> tuple[int, int]:
    """Replay greedy speculative decoding over a known greedy `row` `[T]`: (cycles, tokens they emit).

    A draft is right where it equals the row itself.
    """
    shape = drafter.shape
    with torch.autocast("cpu", ACTIVATIONS):
        outputs = target(row[None])[1]
    taps = torch.cat([outputs[i] for i in shape.target_layer_ids], -1)
    place, cycles = prompt_length, 0
    while place + shape.block_size <= len(row):
        noise, ids = open_blocks(target, row[None, : place + shape.block_size], place, shape.block_size)
        with torch.autocast("cpu", ACTIVATIONS):
            hidden = drafter(taps[:, :place], noise, place)[:, 0, 1:]
            logits = target.head(hidden).float()
            draft = draft_path(drafter, hidden, logits, ids[:, 0, 0])
        right = int((draft == ids[:, 0, 1:]).long().cumprod(-1).sum())
        cycles += 1
        place += right + 1
    return cycles, place - prompt_length


def draft_path(drafter: Drafter, hidden: torch.Tensor, logits: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
    """Propose tokens `[B, block-1]`: argmax per position for v1, the greedy walk of the selector for v2."""
    if not drafter.shape.is_v2:
        return logits.argmax(-1)
    selector, previous, path = drafter.candidate_selector, anchor, []
    unary, candidates = logits.topk(selector.top_k, -1)
    for position in range(hidden.shape[1]):
        scores = selector.scores(hidden[:, position], unary[:, position], candidates[:, position], previous)
        previous = candidates[:, position].gather(-1, scores.argmax(-1, keepdim=True))[:, 0]
        path.append(previous)
    return torch.stack(path, 1)
