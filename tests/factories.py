"""Tiny random pairs of target and drafter, in the real file formats; small enough to make one per test.

The qwen3 target runs in llama.cpp; targets of other architectures carry a header only.
"""

import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from gguf import GGUFWriter
from gguf.constants import GGMLQuantizationType, GGUFValueType
from gguf.quants import quantize

HIDDEN = 64
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
FEED_FORWARD = 96
VOCAB = 288
TARGET_LAYERS = 5
MASK_TOKEN = 1
_SPECIAL = ("<|endoftext|>", "<|mask|>")
_CONTROL, _NORMAL = 3, 1
_NUMPY_DTYPES = {"F16": "float16", "F32": "float32", "F64": "float64", "I8": "int8"}


def make_target(
    path: Path,
    *,
    architecture: str = "qwen3",
    hidden: int = HIDDEN,
    layers: int = TARGET_LAYERS,
    vocab: int = VOCAB,
    mrope: bool = False,
    metadata: Mapping[str, tuple[object, GGUFValueType, GGUFValueType | None]] | None = None,
    seed: int = 0,
) -> Path:
    """A target GGUF with a byte-level tokenizer; `metadata` adds or replaces keys as (value, type, element type)."""
    writer = GGUFWriter(path, architecture)
    writer.add_name("tiny target")
    writer.add_block_count(layers)
    writer.add_context_length(256)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    if mrope:
        writer.add_rope_dimension_sections([2, 3, 3, 0])
    _add_tokenizer(writer, vocab)
    for key, (value, kind, element) in (metadata or {}).items():
        writer.kv_data[0].pop(key, None)
        writer.add_key_value(key, value, kind, element)
    if architecture == "qwen3":
        for name, values in _target_tensors(hidden, layers, vocab, np.random.default_rng(seed)):
            kind = GGMLQuantizationType.F32 if values.ndim == 1 else GGMLQuantizationType.Q8_0
            writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: GGUFWriter, vocab: int) -> None:
    characters = _byte_characters()
    pairs = [(a, b) for a in characters[64:90] for b in characters[64:90]]
    merged = pairs[: max(0, vocab - len(_SPECIAL) - len(characters))]
    tokens = [*_SPECIAL, *characters, *("".join(pair) for pair in merged)][:vocab]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([_CONTROL] * len(_SPECIAL) + [_NORMAL] * (len(tokens) - len(_SPECIAL)))
    writer.add_token_merges([" ".join(pair) for pair in merged] or ["a b"])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")


def _byte_characters() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) for byte in printable] + [chr(256 + i) for i in range(len(others))]


def _target_tensors(
    hidden: int, layers: int, vocab: int, random: np.random.Generator
) -> Iterable[tuple[str, np.ndarray]]:
    def matrix(rows: int, columns: int) -> np.ndarray:
        return random.normal(0, columns**-0.5, (rows, columns)).astype(np.float32)

    yield "token_embd.weight", matrix(vocab, hidden)
    yield "output_norm.weight", np.ones(hidden, np.float32)
    for layer in range(layers):
        prefix = f"blk.{layer}."
        yield prefix + "attn_norm.weight", np.ones(hidden, np.float32)
        yield prefix + "attn_q.weight", matrix(HEADS * HEAD_DIM, hidden)
        yield prefix + "attn_k.weight", matrix(KV_HEADS * HEAD_DIM, hidden)
        yield prefix + "attn_v.weight", matrix(KV_HEADS * HEAD_DIM, hidden)
        yield prefix + "attn_output.weight", matrix(hidden, HEADS * HEAD_DIM)
        yield prefix + "attn_q_norm.weight", np.ones(HEAD_DIM, np.float32)
        yield prefix + "attn_k_norm.weight", np.ones(HEAD_DIM, np.float32)
        yield prefix + "ffn_norm.weight", np.ones(hidden, np.float32)
        yield prefix + "ffn_gate.weight", matrix(FEED_FORWARD, hidden)
        yield prefix + "ffn_up.weight", matrix(FEED_FORWARD, hidden)
        yield prefix + "ffn_down.weight", matrix(hidden, FEED_FORWARD)


def drafter_config(version: int = 2, without: Iterable[str] = (), **overrides: object) -> dict:
    """config.json in the published layout; a dict given for `dflash_config` is merged, `without` names removed keys.

    A removed key goes from both levels, `dflash_config.KEY` from that level alone.
    """
    config = {
        "architectures": ["DFlash2DraftModel" if version == 2 else "DFlashDraftModel"],
        "attention_bias": False,
        "block_size": 4,
        "dflash_config": {"block_size": 4, "mask_token_id": MASK_TOKEN, "target_layer_ids": [0, 2, 3]},
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": FEED_FORWARD,
        "is_causal": False,
        "layer_types": ["sliding_attention", "sliding_attention"],
        "max_position_embeddings": 256,
        "model_type": "qwen3",
        "num_attention_heads": HEADS,
        "num_hidden_layers": 2,
        "num_key_value_heads": KV_HEADS,
        "num_target_layers": TARGET_LAYERS,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "sliding_window": 32,
        "tie_word_embeddings": False,
        "use_sliding_window": True,
        "vocab_size": VOCAB,
    }
    if version == 2:
        config["dflash_config"] |= {
            "conv_kernel_size": 2,
            "conv_group_size": 16,
            "selector_rank": 32,
            "selector_top_k": 4,
        }
    config["dflash_config"] |= overrides.pop("dflash_config", {})
    config |= overrides
    for key in without:
        config["dflash_config"].pop(key.removeprefix("dflash_config."), None)
        config.pop(key, None)
    return config


def drafter_tensors(config: Mapping, seed: int = 0) -> dict[str, np.ndarray]:
    """Random F32 weights under their Hugging Face names, as `config` implies them."""
    draft = {**config, **config["dflash_config"]}
    hidden, ffn, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, key = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, hidden * len(draft.get("target_layer_ids", [0]))),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "self_attn.q_proj.weight": (query, hidden),
            prefix + "self_attn.k_proj.weight": (key, hidden),
            prefix + "self_attn.v_proj.weight": (key, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, query),
            prefix + "self_attn.q_norm.weight": (head_dim,),
            prefix + "self_attn.k_norm.weight": (head_dim,),
            prefix + "post_attention_layernorm.weight": (hidden,),
            prefix + "mlp.gate_proj.weight": (ffn, hidden),
            prefix + "mlp.up_proj.weight": (ffn, hidden),
            prefix + "mlp.down_proj.weight": (hidden, ffn),
        }
        if "conv_kernel_size" in draft:
            taps, groups = draft["conv_kernel_size"], hidden // draft["conv_group_size"]
            for part in ("attention_conv", "mlp_conv"):
                shapes[f"{prefix}{part}.base_kernel"] = (2, taps, hidden)
                shapes[f"{prefix}{part}.kernel_projection.weight"] = (2 * taps * groups, hidden)
    if "selector_rank" in draft:
        rank = draft["selector_rank"]
        shapes["candidate_selector.predecessor_codebook"] = (config["vocab_size"], rank)
        shapes["candidate_selector.successor_codebook"] = (config["vocab_size"], rank)
        shapes["candidate_selector.hidden_projection.weight"] = (rank, hidden)
    random = np.random.default_rng(seed)
    return {name: random.normal(0, shape[-1] ** -0.5, shape).astype(np.float32) for name, shape in shapes.items()}


def write_checkpoint(
    folder: Path,
    config: Mapping,
    tensors: Mapping[str, np.ndarray],
    *,
    dtype: str = "BF16",
    shards: int = 1,
    index: bool = True,
    stem: str = "model",
) -> Path:
    """Write config.json and safetensors: one file, or `shards` of them with or without an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    names = list(tensors)
    files = {
        f"{stem}.safetensors" if shards == 1 else f"{stem}-{shard + 1:05d}-of-{shards:05d}.safetensors": names[
            shard::shards
        ]
        for shard in range(shards)
    }
    for file, held in files.items():
        save_safetensors(folder / file, {name: tensors[name] for name in held}, dtype)
    if shards > 1 and index:
        weight_map = {name: file for file, held in files.items() for name in held}
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def save_safetensors(path: Path, tensors: Mapping[str, np.ndarray], dtype: str) -> None:
    """One file as the format describes it: header length, JSON header padded to 8 bytes, data."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, values in tensors.items():
        size = len(stored_bytes(values, dtype))
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [position, position + size]}
        position += size
    data = b"".join(stored_bytes(values, dtype) for values in tensors.values())
    path.write_bytes(safetensors_bytes(json.dumps(header), data))


def safetensors_bytes(header: str, data: bytes = b"") -> bytes:
    """A file of the given header, well formed or not."""
    encoded = header.encode()
    encoded += b" " * (-len(encoded) % 8)
    return struct.pack("<Q", len(encoded)) + encoded + data


def stored_bytes(values: np.ndarray, dtype: str) -> bytes:
    """F32 values as the bytes of a safetensors dtype (BF16 rounds to nearest even)."""
    if dtype == "BF16":
        return quantize(values, GGMLQuantizationType.BF16).tobytes()
    return values.astype(_NUMPY_DTYPES[dtype]).tobytes()


def make_drafter(folder: Path, version: int = 2, *, dtype: str = "BF16", seed: int = 0, **config: object) -> Path:
    """A drafter checkpoint in the published layout that fits `make_target`."""
    settings = drafter_config(version, **config)
    return write_checkpoint(folder, settings, drafter_tensors(settings, seed), dtype=dtype)
