"""Random weights of the 27B pair's geometry: Qwen3.8-27B (qwen35) and its DFlash 2 drafter, as Q4_K_M files hold them.

Blocks of random bytes with small scales go straight into the files, a tensor at a time: nothing is quantised, no
number is infinite or not one, and no matrix is ever held as floats. What such a model says means nothing; what it
costs is what the real pair costs. Scaled copies (`Geometry.scaled`) prove the scripts on machines without a GPU.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice, product
from pathlib import Path
from string import ascii_lowercase

import numpy as np
from filelock import FileLock
from gguf import GGUFWriter
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType

from dflash2.cache import cache_folder

F32 = GGMLQuantizationType.F32
Q4_K, Q5_K, Q6_K = GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q5_K, GGMLQuantizationType.Q6_K

BLOCK = 8
_K_BLOCK = 256  # weights in a block of a K-quant: rows are multiples of it
_HEAD_DIM, _DRAFT_HEAD_DIM, _STATE, _CONV = 256, 128, 128, 4
_RANK, _TOP_K, _TAPS, _GROUP, _WINDOW = 256, 16, 2, 16, 2048
_END, _MASK = 0, 1  # token ids; the head's row of the first is zero, so that nothing ends early
_SPECIAL = ("<|endoftext|>", "<|mask|>")
_VERSION = 1  # part of the cache key; raised when the same geometry gives other files


@dataclass(frozen=True)
class Geometry:
    """Sizes of both models. Heads of the delta net come in groups of three value heads to a key head.

    Source: facts of the published checkpoints; a recurrent snapshot of it is the 149.6 MiB that llama.cpp reports.
    """

    layers: int = 64
    width: int = 5120
    vocabulary: int = 248320
    feed_forward: int = 17408
    kv_heads: int = 4
    queries_per_kv: int = 6
    key_groups: int = 16
    draft_layers: int = 5
    draft_kv_heads: int = 8
    taps: tuple[int, ...] = (5, 19, 33, 47, 61)
    context: int = 262144

    @classmethod
    def scaled(cls, layers: int, width: int, vocabulary: int) -> Geometry:
        """The same pair with fewer layers, a narrower `width` (a multiple of 256, at least 512), fewer tokens."""
        if width % _K_BLOCK or width < 2 * _K_BLOCK:
            raise ValueError(f"The width must be a multiple of {_K_BLOCK} from {2 * _K_BLOCK} on, not {width}.")
        if layers < 4 or layers % 4:
            raise ValueError(f"The layers come in fours, three of the delta net and one of attention, not {layers}.")
        full, share = cls(), width / cls.width
        return cls(
            layers=layers,
            width=width,
            vocabulary=vocabulary,
            feed_forward=-(-int(full.feed_forward * share) // _K_BLOCK) * _K_BLOCK,
            kv_heads=max(1, round(full.kv_heads * share)),
            key_groups=2 * max(1, round(full.key_groups * share / 2)),  # even: rows of ssm_out hold whole blocks
            draft_layers=min(full.draft_layers, layers),
            draft_kv_heads=max(1, round(full.draft_kv_heads * share)),
            # The last layer's output is not published as a layer's input.
            taps=tuple(sorted({min(tap * layers // full.layers, layers - 2) for tap in full.taps})),
        )


@dataclass(frozen=True)
class Tensor:
    """`shape` in numpy's order; `fill` makes the values of an F32 tensor, other types get random blocks."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType = F32
    fill: Callable[[tuple[int, ...]], np.ndarray] = np.ones

    @property
    def byte_shape(self) -> tuple[int, ...]:
        per_block, n_bytes = GGML_QUANT_SIZES[self.type]
        return (*self.shape[:-1], self.shape[-1] // per_block * n_bytes)


def random_pair(geometry: Geometry, folder: Path | None = None) -> tuple[Path, Path]:
    """Target and drafter of `geometry` in `folder` (None: the cache), made on the first call: 17 GB at full size."""
    folder = folder or cache_folder("models")
    key = hashlib.sha256(f"{_VERSION} {asdict(geometry)}".encode()).hexdigest()[:12]
    names = {"target": _write_target, "drafter": _write_drafter}
    paths = {name: folder / f"random-{geometry.layers}x{geometry.width}-{key}-{name}.gguf" for name in names}
    with FileLock(folder / f"random-{key}.lock"):
        for name, write in names.items():
            if not paths[name].is_file():
                partial = paths[name].with_suffix(".partial")
                write(geometry, partial)
                partial.replace(paths[name])
    return paths["target"], paths["drafter"]


def _write_target(g: Geometry, path: Path) -> None:
    writer = GGUFWriter(path, "qwen35")
    heads = g.kv_heads * g.queries_per_kv
    _add_common(writer, g, g.layers, heads, g.kv_heads, _HEAD_DIM)
    writer.add_rope_dimension_count(_HEAD_DIM // 4)
    writer.add_rope_dimension_sections([11, 11, 10, 0])
    writer.add_ssm_conv_kernel(_CONV)
    writer.add_ssm_state_size(_STATE)
    writer.add_ssm_group_count(g.key_groups)
    writer.add_ssm_time_step_rank(3 * g.key_groups)
    writer.add_ssm_inner_size(3 * g.key_groups * _STATE)
    writer.add_uint32("qwen35.full_attention_interval", 4)
    _add_tokenizer(writer, g.vocabulary)
    _write(writer, [*target_tensors(g)])


def target_tensors(g: Geometry) -> Iterator[Tensor]:
    """Of the qwen35 model, types as in a Q4_K_M file."""
    yield Tensor("token_embd.weight", (g.vocabulary, g.width), Q4_K)
    yield Tensor("output.weight", (g.vocabulary, g.width), Q6_K)
    yield Tensor("output_norm.weight", (g.width,))
    for layer in range(g.layers):
        p = f"blk.{layer}."
        more = Q6_K if _has_more_bits(layer, g.layers) else Q4_K
        yield Tensor(p + "attn_norm.weight", (g.width,))
        yield Tensor(p + "post_attention_norm.weight", (g.width,))
        yield from _attention(g, p) if layer % 4 == 3 else _delta_net(g, p)
        yield Tensor(p + "ffn_gate.weight", (g.feed_forward, g.width), Q4_K)
        yield Tensor(p + "ffn_up.weight", (g.feed_forward, g.width), Q4_K)
        yield Tensor(p + "ffn_down.weight", (g.width, g.feed_forward), more)


def _attention(g: Geometry, p: str) -> Iterator[Tensor]:
    query = g.kv_heads * g.queries_per_kv * _HEAD_DIM
    yield Tensor(p + "attn_q.weight", (2 * query, g.width), Q4_K)  # query and gate
    yield Tensor(p + "attn_k.weight", (g.kv_heads * _HEAD_DIM, g.width), Q4_K)
    yield Tensor(p + "attn_v.weight", (g.kv_heads * _HEAD_DIM, g.width), Q6_K)
    yield Tensor(p + "attn_output.weight", (g.width, query), Q4_K)
    yield Tensor(p + "attn_q_norm.weight", (_HEAD_DIM,))
    yield Tensor(p + "attn_k_norm.weight", (_HEAD_DIM,))


def _delta_net(g: Geometry, p: str) -> Iterator[Tensor]:
    heads, value = 3 * g.key_groups, 3 * g.key_groups * _STATE
    channels = 2 * g.key_groups * _STATE + value
    yield Tensor(p + "attn_qkv.weight", (channels, g.width), Q5_K)
    yield Tensor(p + "attn_gate.weight", (value, g.width), Q4_K)
    yield Tensor(p + "ssm_conv1d.weight", (channels, _CONV), fill=lambda shape: np.full(shape, 1 / _CONV))
    yield Tensor(p + "ssm_dt.bias", (heads,), fill=lambda shape: np.full(shape, -1.0))
    yield Tensor(p + "ssm_a", (heads,), fill=lambda shape: np.full(shape, -1.0))
    yield Tensor(p + "ssm_beta.weight", (heads, g.width), Q4_K)
    yield Tensor(p + "ssm_alpha.weight", (heads, g.width), Q4_K)
    yield Tensor(p + "ssm_norm.weight", (_STATE,))
    yield Tensor(p + "ssm_out.weight", (g.width, value), Q4_K)


def _write_drafter(g: Geometry, path: Path) -> None:
    writer = GGUFWriter(path, "dflash")
    _add_common(writer, g, g.draft_layers, 4 * g.draft_kv_heads, g.draft_kv_heads, _DRAFT_HEAD_DIM)
    writer.add_rope_dimension_count(_DRAFT_HEAD_DIM)
    writer.add_rope_dimension_sections([_DRAFT_HEAD_DIM // 2, 0, 0, 0])
    writer.add_sliding_window(_WINDOW)
    writer.add_array("dflash.attention.sliding_window_pattern", [True] * g.draft_layers)
    writer.add_bool("dflash.attention.causal", False)
    writer.add_array("dflash.target_layers", [tap + 1 for tap in g.taps])
    sizes = {"block_size": BLOCK, "conv_kernel_size": _TAPS, "conv_group_size": _GROUP}
    for key, value in {**sizes, "selector_rank": _RANK, "selector_top_k": _TOP_K}.items():
        writer.add_uint32(f"dflash.{key}", value)
    _add_tokenizer(writer, g.vocabulary)
    _write(writer, [*drafter_tensors(g)])


def drafter_tensors(g: Geometry) -> Iterator[Tensor]:
    """Of the DFlash 2 drafter, types as in a Q4_K_M file."""
    query, key = 4 * g.draft_kv_heads * _DRAFT_HEAD_DIM, g.draft_kv_heads * _DRAFT_HEAD_DIM
    yield Tensor("fc.weight", (g.width, len(g.taps) * g.width), Q4_K)
    yield Tensor("enc.output_norm.weight", (g.width,))
    yield Tensor("output_norm.weight", (g.width,))
    yield Tensor("selector_predecessor.weight", (g.vocabulary, _RANK), Q4_K)
    yield Tensor("selector_successor.weight", (g.vocabulary, _RANK), Q4_K)
    yield Tensor("selector_hidden.weight", (_RANK, g.width), Q4_K)
    for layer in range(g.draft_layers):
        p = f"blk.{layer}."
        more = Q6_K if _has_more_bits(layer, g.draft_layers) else Q4_K
        yield Tensor(p + "attn_norm.weight", (g.width,))
        yield Tensor(p + "ffn_norm.weight", (g.width,))
        yield Tensor(p + "attn_q.weight", (query, g.width), Q4_K)
        yield Tensor(p + "attn_k.weight", (key, g.width), Q4_K)
        yield Tensor(p + "attn_v.weight", (key, g.width), more)
        yield Tensor(p + "attn_output.weight", (g.width, query), Q4_K)
        yield Tensor(p + "attn_q_norm.weight", (_DRAFT_HEAD_DIM,))
        yield Tensor(p + "attn_k_norm.weight", (_DRAFT_HEAD_DIM,))
        yield Tensor(p + "ffn_gate.weight", (g.feed_forward, g.width), Q4_K)
        yield Tensor(p + "ffn_up.weight", (g.feed_forward, g.width), Q4_K)
        yield Tensor(p + "ffn_down.weight", (g.width, g.feed_forward), more)
        for part in ("attn", "ffn"):
            yield Tensor(p + part + "_conv_base", (2, _TAPS, g.width), fill=lambda shape: np.full(shape, 1 / _TAPS))
            yield Tensor(p + part + "_conv_proj.weight", (2 * _TAPS * g.width // _GROUP, g.width), Q4_K)


def _has_more_bits(layer: int, layers: int) -> bool:
    """Half of the layers, at both ends and every third between, have wider ffn_down (and attn_v) in a Q4_K_M file."""
    first = layers // 8
    return layer < first or layer >= 7 * layers // 8 or (layer - first) % 3 == 2


def _add_common(writer: GGUFWriter, g: Geometry, layers: int, heads: int, kv_heads: int, head_dim: int) -> None:
    writer.add_file_type(LlamaFileType.MOSTLY_Q4_K_M)
    writer.add_block_count(layers)
    writer.add_context_length(g.context)
    writer.add_embedding_length(g.width)
    writer.add_feed_forward_length(g.feed_forward)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e7)


def _add_tokenizer(writer: GGUFWriter, vocabulary: int) -> None:
    """As many byte-level tokens as the real one has: words of letters, so that any of them is text."""
    words = ("".join(letters) for length in range(1, 5) for letters in product(ascii_lowercase, repeat=length))
    tokens = [*_SPECIAL, *islice(words, vocabulary - len(_SPECIAL))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen35")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(_SPECIAL) + [1] * (vocabulary - len(_SPECIAL)))  # control, normal
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(_END)
    writer.add_bos_token_id(_END)
    writer.add_add_bos_token(False)
    writer.add_mask_token_id(_MASK)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")


def _write(writer: GGUFWriter, tensors: list[Tensor]) -> None:
    for t in tensors:
        n_bytes = int(np.prod(t.byte_shape, dtype=np.int64))
        writer.add_tensor_info(t.name, t.byte_shape, np.dtype(np.uint8), n_bytes, t.type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    random = np.random.Generator(np.random.SFC64(0))
    for t in tensors:
        writer.write_tensor_data(t.fill(t.shape).astype(np.float32) if t.type == F32 else _blocks(t, random))
    writer.close()


def _blocks(t: Tensor, random: np.random.Generator) -> np.ndarray:
    """Random blocks, [rows, bytes]: weights around zero that keep the length of a vector, none infinite."""
    per_block, n_bytes = GGML_QUANT_SIZES[t.type]
    count = t.shape[0] * t.shape[1] // per_block
    words = random.integers(0, 2**64, -(-count * n_bytes // 8), np.uint64)
    blocks = words.view(np.uint8)[: count * n_bytes].reshape(count, n_bytes)
    scale, offset, layout = _SCALES[t.type]
    step = t.shape[-1] ** -0.5 / scale
    # The two halves (d, dmin) or the one (d) are the only floats of a block.
    blocks[:, layout] = np.array([step, offset * step] if offset else [step], np.float16).view(np.uint8)
    rows = blocks.reshape(t.shape[0], -1)
    if t.name == "output.weight":
        rows[_END] = 0
    return rows


# Deviation of the weights of a block whose d is 1; dmin over d, which makes their mean zero; where d (and dmin) lie.
# Q4_K and Q5_K: d * scale (0-63) * quant (0-15, 0-31) - dmin * min (0-63); Q6_K: d * scale (+-128) * quant (+-32).
_SCALES = {Q4_K: (254.0, 7.5, slice(0, 4)), Q5_K: (521.0, 15.5, slice(0, 4)), Q6_K: (1366.0, 0.0, slice(208, 210))}
