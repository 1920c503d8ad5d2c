"""Write the trained pair: the target as a Q8_0 GGUF, the drafters in the published Hugging Face layout."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import torch
from corpus import END_OF_TEXT_ID, MASK_ID, SPECIAL_TOKENS
from drafter import Drafter, DrafterShape
from safetensors.torch import save_file
from target import Target, TransformerShape
from tokenizers import Tokenizer

LICENSE_ID = "PSF-2.0"
LICENSE_NOTE = "Trained on the Python standard library (PSF licence 2.0); weights released under the MIT licence."
QUANTIZATION = gguf.GGMLQuantizationType.Q8_0

_LAYER_TENSORS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """Return the GGUF name of a target parameter (`layers.0.mlp.up_proj.weight` -> `blk.0.ffn_up.weight`)."""
    if name == "embed_tokens.weight":
        return "token_embd.weight"
    if name == "norm.weight":
        return "output_norm.weight"
    _, layer, rest = name.split(".", 2)
    return f"blk.{layer}.{_LAYER_TENSORS[rest.removesuffix('.weight')]}.weight"


def round_to_q8_0(target: Target) -> None:
    """Replace every matrix by its Q8_0 value, so that drafters are trained on the target that is shipped."""
    with torch.no_grad():
        for parameter in target.parameters():
            if parameter.dim() == 2:
                packed = gguf.quants.quantize(parameter.numpy(), QUANTIZATION)
                parameter.copy_(torch.from_numpy(gguf.quants.dequantize(packed, QUANTIZATION)))


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Tokenizer) -> None:
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    kinds = [gguf.TokenType.CONTROL if t in SPECIAL_TOKENS else gguf.TokenType.NORMAL for t in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in model["merges"]])
    writer.add_bos_token_id(END_OF_TEXT_ID)
    writer.add_eos_token_id(END_OF_TEXT_ID)
    writer.add_pad_token_id(END_OF_TEXT_ID)
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)


def write_target(target: Target, tokenizer: Tokenizer, path: Path) -> None:
    """Write the target as GGUF: matrices Q8_0, norms F32."""
    shape = target.shape
    writer = gguf.GGUFWriter(str(path), "qwen3")
    writer.add_name("llama-dflash2 demo target")
    writer.add_description(LICENSE_NOTE)
    writer.add_license(LICENSE_ID)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.context_length)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_feed_forward_length(shape.ffn_size)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(shape.rms_eps)
    writer.add_rope_freq_base(shape.rope_theta)
    writer.add_vocab_size(shape.vocab_size)
    _add_tokenizer(writer, tokenizer)
    for name, parameter in target.named_parameters():
        data = parameter.detach().numpy().astype(np.float32)
        if data.ndim == 2:
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(data, QUANTIZATION), raw_dtype=QUANTIZATION)
        else:
            writer.add_tensor(gguf_name(name), data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def drafter_config(shape: DrafterShape, target: TransformerShape) -> dict[str, object]:
    """Return `config.json` of a drafter with the keys of the published checkpoints."""
    transformer = shape.transformer
    dflash: dict[str, object] = {
        "block_size": shape.block_size,
        "mask_token_id": MASK_ID,
        "target_layer_ids": list(shape.target_layer_ids),
    }
    if shape.is_v2:
        dflash |= {
            "conv_kernel_size": shape.conv_kernel_size,
            "conv_group_size": shape.conv_group_size,
            "selector_rank": shape.selector_rank,
            "selector_top_k": shape.selector_top_k,
        }
    return {
        "architectures": ["DFlash2DraftModel" if shape.is_v2 else "DFlashDraftModel"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "block_size": shape.block_size,
        "bos_token_id": END_OF_TEXT_ID,
        "dflash_config": dflash,
        "dtype": "bfloat16",
        "eos_token_id": END_OF_TEXT_ID,
        "head_dim": transformer.head_dim,
        "hidden_act": "silu",
        "hidden_size": transformer.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": transformer.ffn_size,
        "is_causal": False,
        "layer_types": ["sliding_attention"] * transformer.layers,
        "max_position_embeddings": transformer.context_length,
        "max_window_layers": transformer.layers,
        "model_type": "qwen3",
        "num_attention_heads": transformer.heads,
        "num_hidden_layers": transformer.layers,
        "num_key_value_heads": transformer.kv_heads,
        "num_target_layers": target.layers,
        "rms_norm_eps": transformer.rms_eps,
        "rope_scaling": None,
        "rope_theta": transformer.rope_theta,
        "sliding_window": shape.window,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": True,
        "vocab_size": transformer.vocab_size,
    }


def write_drafter(drafter: Drafter, target: TransformerShape, folder: Path) -> None:
    """Write `config.json` and `model.safetensors` (BF16) of a drafter."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.dumps(drafter_config(drafter.shape, target), indent=2)
    (folder / "config.json").write_text(config + "\n", encoding="utf-8")
    tensors = {name: p.detach().to(torch.bfloat16).contiguous() for name, p in drafter.named_parameters()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt", "license": LICENSE_NOTE})
