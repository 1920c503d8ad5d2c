"""The tensors that llama.cpp's dflash loader takes, with their shapes, from the metadata of one GGUF file.

Source: `load_arch_tensors` of the pinned llama.cpp (src/models/dflash.cpp). Shapes are in ggml order.
"""

from __future__ import annotations

from dataclasses import dataclass

from dflash2.gguf_info import GGUFInfo

SELECTOR_TENSOR = "selector_hidden.weight"
VOCABULARY_MAP = "d2t"

_Row = tuple[str, tuple[str, ...]]

_MODEL: tuple[_Row, ...] = (
    ("fc.weight", ("taps*hidden", "hidden")),
    ("enc.output_norm.weight", ("hidden",)),
    ("output_norm.weight", ("hidden",)),
)
_MODEL_OPTIONAL: tuple[_Row, ...] = (
    ("token_embd.weight", ("hidden", "vocab")),
    ("output.weight", ("hidden", "rows")),
    (VOCABULARY_MAP, ("rows",)),
    ("rope_freqs.weight", ("head/2",)),
    ("fc.scale", ("one",)),
)
_SELECTOR: tuple[_Row, ...] = (
    ("selector_predecessor.weight", ("rank", "vocab")),
    ("selector_successor.weight", ("rank", "vocab")),
    (SELECTOR_TENSOR, ("hidden", "rank")),
)
_LAYER: tuple[_Row, ...] = (
    ("attn_norm.weight", ("hidden",)),
    ("attn_q.weight", ("hidden", "query")),
    ("attn_k.weight", ("hidden", "key")),
    ("attn_output.weight", ("query", "hidden")),
    ("attn_q_norm.weight", ("head",)),
    ("attn_k_norm.weight", ("head",)),
    ("ffn_norm.weight", ("hidden",)),
    ("ffn_gate.weight", ("hidden", "ffn")),
    ("ffn_up.weight", ("hidden", "ffn")),
    ("ffn_down.weight", ("ffn", "hidden")),
)
_LAYER_OPTIONAL: tuple[_Row, ...] = (
    ("attn_v.weight", ("hidden", "value")),
    ("attn_sinks.weight", ("heads",)),
    ("post_attention_norm.weight", ("hidden",)),
    ("post_ffw_norm.weight", ("hidden",)),
    ("layer_output_scale.weight", ("one",)),
)
_CONVOLUTION: tuple[_Row, ...] = (
    ("attn_conv_base", ("hidden", "kernel", "sides")),
    ("attn_conv_proj.weight", ("hidden", "kernels")),
    ("ffn_conv_base", ("hidden", "kernel", "sides")),
    ("ffn_conv_proj.weight", ("hidden", "kernels")),
)
MAX_LAYERS = 512  # LLAMA_MAX_LAYERS
_MAX_SIZE = 2**31 - 1
# Keys whose values the shapes are made of, by the symbol they stand for.
_SIZES = {
    "hidden": "embedding_length",
    "ffn": "feed_forward_length",
    "heads": "attention.head_count",
    "kv_heads": "attention.head_count_kv",
    "head": "attention.key_length",
    "value_head": "attention.value_length",
    "layers": "block_count",
}
_SELECTOR_SIZES = {"rank": "selector_rank", "kernel": "conv_kernel_size", "group": "conv_group_size"}


@dataclass(frozen=True)
class Slot:
    """One tensor the loader asks for: `shape` in ggml order, `required` or taken if it is there."""

    shape: tuple[int, ...]
    required: bool


def missing_sizes(info: GGUFInfo) -> list[str]:
    """Keys without which the loader cannot size the drafter's tensors, or whose values are no such sizes."""
    wanted = dict(_SIZES)
    if SELECTOR_TENSOR in info.tensor_names:
        wanted |= _SELECTOR_SIZES
    return [info.own(key) for key in wanted.values() if _positive(info, key) is None]


def loader_slots(info: GGUFInfo, n_taps: int, vocab_size: int) -> dict[str, Slot]:
    """Every tensor the loader asks for, by name; only for a file of which `missing_sizes` is empty."""
    has_selector = SELECTOR_TENSOR in info.tensor_names
    sizes = _symbols(info, n_taps, vocab_size, has_selector)
    slots: dict[str, Slot] = {}

    def add(rows: tuple[_Row, ...], prefix: str, required: bool) -> None:
        for name, symbols in rows:
            slots[prefix + name] = Slot(tuple(sizes[symbol] for symbol in symbols), required)

    add(_MODEL, "", True)
    add(_MODEL_OPTIONAL, "", False)
    if has_selector:
        add(_SELECTOR, "", True)
    for layer in range(sizes["layers"]):
        prefix = f"blk.{layer}."
        add(_LAYER, prefix, True)
        add(_LAYER_OPTIONAL, prefix, False)
        if has_selector:
            add(_CONVOLUTION, prefix, True)
    return slots


def must_be_f32(name: str, shape: tuple[int, ...]) -> bool:
    """Whether the graph adds or multiplies this tensor element by element, which the CPU backend does in F32 alone."""
    return name != VOCABULARY_MAP and (len(shape) == 1 or name.endswith("_conv_base"))


def _symbols(info: GGUFInfo, n_taps: int, vocab_size: int, has_selector: bool) -> dict[str, int]:
    sizes = {symbol: _positive(info, key) or 0 for symbol, key in _SIZES.items()}
    map_shape = next((tensor.shape for tensor in info.tensors if tensor.name == VOCABULARY_MAP), ())
    sizes |= {
        "one": 1,
        "sides": 2,
        "vocab": vocab_size,
        "rows": map_shape[0] if map_shape else vocab_size,
        "taps*hidden": n_taps * sizes["hidden"],
        "query": sizes["heads"] * sizes["head"],
        "key": sizes["kv_heads"] * sizes["head"],
        "value": sizes["kv_heads"] * sizes["value_head"],
        "head/2": sizes["head"] // 2,
    }
    if has_selector:
        sizes |= {symbol: _positive(info, key) or 0 for symbol, key in _SELECTOR_SIZES.items()}
        sizes["kernels"] = 2 * sizes["kernel"] * (sizes["hidden"] // max(1, sizes["group"]))
    return sizes


def _positive(info: GGUFInfo, key: str) -> int | None:
    value = info.metadata.get(info.own(key))
    limit = MAX_LAYERS if key == _SIZES["layers"] else _MAX_SIZE
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= limit else None
