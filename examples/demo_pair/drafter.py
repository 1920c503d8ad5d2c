"""The demo drafters: DFlash (v1) and DFlash 2, trained on the target's own continuations.

The layer follows the reference package `dflash` 0.1.0: queries from the block alone, keys and values from the injected
target features and the block. Training runs many anchors of one row at once: every anchor opens a block of its own,
which sees the injected positions before the anchor (inside the window) and itself.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
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
        self,
        x: torch.Tensor,
        features: torch.Tensor,
        rope: RotaryEmbedding,
        block_positions: torch.Tensor,
        visible: torch.Tensor,
    ) -> torch.Tensor:
        """Advance blocks `x` `[B, A, K, D]` over `features` `[B, S, D]`; `visible` is `[B, A*K, S + A*K]`."""
        rows, anchors, block, size = x.shape
        y = self.input_layernorm(x)
        if self.is_v2:
            kernels = self.attention_conv.kernels(y)
            y = self.attention_conv.apply_side(y, kernels, 0)
        flat = y.reshape(rows, anchors * block, size)
        k_context, v_context = self.self_attn.keys_values(features, rope, torch.arange(features.shape[1]))
        k_block, v_block = self.self_attn.keys_values(flat, rope, block_positions)
        y = self.self_attn.attend(
            self.self_attn.queries(flat, rope, block_positions),
            torch.cat([k_context, k_block], 2),
            torch.cat([v_context, v_block], 2),
            visible,
        ).view_as(x)
        x = x + (self.attention_conv.apply_side(y, kernels, 1) if self.is_v2 else y)
        y = self.post_attention_layernorm(x)
        if self.is_v2:
            kernels = self.mlp_conv.kernels(y)
            y = self.mlp_conv.apply_side(y, kernels, 0)
        y = self.mlp(y)
        return x + (self.mlp_conv.apply_side(y, kernels, 1) if self.is_v2 else y)


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

    def forward(self, taps: torch.Tensor, noise: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        """Return final-norm states `[B, A, block, D]` of the blocks opened at `anchors` `[B, A]`.

        `taps` `[B, S, n*D]` are the tapped target layers' outputs, `noise` `[B, A, block, D]` the embedded blocks.
        """
        rows, count, block, _ = noise.shape
        features = self.hidden_norm(self.fc(taps))
        positions = (anchors[:, :, None] + torch.arange(block)).flatten(1)
        context = torch.arange(features.shape[1])
        sees_context = (context < anchors.repeat_interleave(block, 1)[..., None]) & (
            positions[..., None] - context < self.shape.window
        )
        own_block = torch.eye(count, dtype=torch.bool).repeat_interleave(block, 0).repeat_interleave(block, 1)
        visible = torch.cat([sees_context, own_block.expand(rows, -1, -1)], -1)
        x = noise
        for layer in self.layers:
            x = layer(x, features, self.rope, positions, visible)
        return self.norm(x)


def open_blocks(
    target: Target, tokens: torch.Tensor, anchors: torch.Tensor, block: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the noise embeddings `[B, A, block, D]` and the token ids `[B, A, block]` at `anchors` `[B, A]`."""
    ids = tokens.gather(1, (anchors[..., None] + torch.arange(block)).flatten(1)).view(*anchors.shape, block)
    noise_ids = torch.full_like(ids, MASK_ID)
    noise_ids[..., 0] = ids[..., 0]
    return target.embed_tokens(noise_ids).to(ACTIVATIONS), ids


def drafter_loss(
    drafter: Drafter, target: Target, taps: torch.Tensor, noise: torch.Tensor, ids: torch.Tensor, anchors: torch.Tensor
) -> torch.Tensor:
    """Cross-entropy of every drafted position, decaying along the block, plus the selector's over its top-K."""
    with torch.autocast("cpu", ACTIVATIONS):
        hidden = drafter(taps, noise, anchors)[:, :, 1:]
        logits = target.head(hidden).float()
    labels = ids[..., 1:]
    weights = torch.exp(-torch.arange(labels.shape[-1]) / 4.0)
    weights = (weights / weights.sum()).expand_as(labels)
    unary = F.cross_entropy(logits.flatten(0, 2), labels.flatten(), reduction="none").view_as(labels)
    loss = (unary * weights).sum(-1).mean()
    if drafter.shape.is_v2:
        selector = drafter.candidate_selector
        candidates = logits.detach().topk(selector.top_k, -1).indices
        with torch.autocast("cpu", ACTIVATIONS):
            scores = selector.scores(hidden, logits.gather(-1, candidates), candidates, ids[..., :-1])
        hit = candidates == labels[..., None]
        chosen = scores.log_softmax(-1).masked_fill(~hit, 0.0).sum(-1)
        loss = loss - (chosen * weights).sum(-1).mean()
    return loss


@dataclass(frozen=True)
class Continuations:
    """Drafter data: token rows int16 `[N, T]`, their prompt lengths `[N]`, tapped states bfloat16 `[N, T, n*D]`."""

    rows: np.ndarray
    prompt_lengths: np.ndarray
    taps: torch.Tensor


@torch.inference_mode()
def tap_target(target: Target, layer_ids: tuple[int, ...], rows: np.ndarray, batch: int = 32) -> torch.Tensor:
    """Return the outputs of the tapped layers for token `rows` `[N, T]`, once for all drafters: `[N, T, n*D]`."""
    taps = torch.empty(*rows.shape, len(layer_ids) * target.shape.hidden_size, dtype=ACTIVATIONS)
    for begin in range(0, len(rows), batch):
        tokens = torch.from_numpy(rows[begin : begin + batch].astype(np.int64))
        with torch.autocast("cpu", ACTIVATIONS):
            outputs = target(tokens)[1]
        taps[begin : begin + batch] = torch.cat([outputs[i] for i in layer_ids], -1)
    return taps


def training_batches(
    data: Continuations, batch: int, anchors: int, block: int, seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield token rows `[B, T]`, taps `[B, T, n*D]` and random anchors `[B, A]` in continuations, without end."""
    rng = np.random.default_rng(seed)
    while True:
        order = rng.permutation(len(data.rows))
        for begin in range(0, len(order) - batch + 1, batch):
            index = order[begin : begin + batch]
            low = data.prompt_lengths[index][:, None]
            places = rng.random((batch, anchors)) * (data.rows.shape[1] - block - low) + low
            tokens = torch.from_numpy(data.rows[index].astype(np.int64))
            yield tokens, data.taps[torch.from_numpy(index)], torch.from_numpy(places.astype(np.int64))


def train_drafter(
    shape: DrafterShape, target: Target, data: Continuations, steps: int, batch: int, anchors: int, seed: int, log: Log
) -> Drafter:
    """Train a drafter; v1 and v2 see the same rows and anchors in the same order at the same seed."""
    torch.manual_seed(seed)
    drafter = Drafter(shape)
    drafter.start_from(target)
    optimizers, scale = make_optimizers(drafter, matrix_lr=3e-3, other_lr=3e-3)
    target.requires_grad_(False)
    loss_of = torch.compile(drafter_loss, dynamic=False)
    batches = training_batches(data, batch, anchors, shape.block_size, seed)
    name, running, begin = "v2" if shape.is_v2 else "v1", 0.0, time.perf_counter()
    for step in range(steps):
        tokens, taps, places = next(batches)
        noise, ids = open_blocks(target, tokens, places, shape.block_size)
        scale(schedule(step, steps))
        loss = loss_of(drafter, target, taps, noise, ids, places)
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
def accepted_lengths(
    drafter: Drafter, target: Target, tokens: torch.Tensor, prompt_length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Replay greedy speculative decoding over known greedy rows `tokens` `[B, T]`: (cycles `[B]`, emitted `[B]`).

    A draft is right where it equals the row itself, so every row only needs its own pointer.
    """
    shape, (count, total) = drafter.shape, tokens.shape
    with torch.autocast("cpu", ACTIVATIONS):
        outputs = target(tokens)[1]
    taps = torch.cat([outputs[i] for i in shape.target_layer_ids], -1)
    place = torch.full((count, 1), prompt_length)
    cycles = torch.zeros(count, dtype=torch.long)
    while (active := place[:, 0] <= total - shape.block_size).any():
        clipped = place.clamp(max=total - shape.block_size)
        noise, ids = open_blocks(target, tokens, clipped, shape.block_size)
        with torch.autocast("cpu", ACTIVATIONS):
            hidden = drafter(taps, noise, clipped)[:, 0, 1:]
            logits = target.head(hidden).float()
            draft = draft_path(drafter, hidden, logits, ids[:, 0, 0])
        right = (draft == ids[:, 0, 1:]).long().cumprod(-1).sum(-1)
        cycles += active
        place[:, 0] += torch.where(active, right + 1, 0)
    return cycles.numpy(), (place[:, 0] - prompt_length).numpy()


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
