"""Drafter GGUFs that differ from a converted one in a stated way: keys, names, types; and a fork's spelling of one.

Written with the gguf package's own reader and writer, not with the code under test.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from gguf import GGUFReader, GGUFWriter
from gguf.constants import GGMLQuantizationType, GGUFValueType

MASK_KEY = "tokenizer.ggml.mask_token_id"
Value = tuple[object, GGUFValueType, GGUFValueType | None]

# How three forks spell a drafter: architecture, keys below it, tensors. Taps stay as Hugging Face counts them.
FORKS: dict[str, tuple[str, dict[str, str], dict[str, str]]] = {
    "flat": (
        "dflash-draft",
        {
            "dflash.block_size": "dflash-draft.dflash.block_size",
            "dflash.target_layers": "dflash-draft.dflash.target_layer_ids",
            MASK_KEY: "dflash-draft.dflash.mask_token_id",
            "dflash.selector_rank": "dflash-draft.dflash2.selector_rank",
            "dflash.selector_top_k": "dflash-draft.dflash2.selector_top_k",
            "dflash.conv_kernel_size": "dflash-draft.dflash2.conv_taps",
            "dflash.conv_group_size": "dflash-draft.dflash2.conv_group_size",
        },
        {
            "fc.weight": "dflash_fc.weight",
            "enc.output_norm.weight": "dflash_hidden_norm.weight",
            "selector_hidden.weight": "selector_hproj.weight",
            "selector_predecessor.weight": "selector_pred",
            "selector_successor.weight": "selector_succ",
            "ffn_norm.weight": "post_attention_norm.weight",
        },
    ),
    "dotted": (
        "qwen35-dflash-draft",
        {
            "dflash.block_size": "qwen35-dflash-draft.dflash.block_size",
            "dflash.target_layers": "qwen35-dflash-draft.dflash.target_layer_ids",
            MASK_KEY: "qwen35-dflash-draft.dflash.mask_token_id",
            "dflash.selector_rank": "qwen35-dflash-draft.dflash.dflash2.selector_rank",
            "dflash.selector_top_k": "qwen35-dflash-draft.dflash.dflash2.selector_top_k",
            "dflash.conv_kernel_size": "qwen35-dflash-draft.dflash.dflash2.conv_kernel_size",
            "dflash.conv_group_size": "qwen35-dflash-draft.dflash.dflash2.conv_group_size",
        },
        {
            "fc.weight": "dflash.fc.weight",
            "enc.output_norm.weight": "dflash.hidden_norm.weight",
            "selector_hidden.weight": "dflash.selector.hproj.weight",
            "selector_predecessor.weight": "dflash.selector.pred_cb",
            "selector_successor.weight": "dflash.selector.succ_cb",
            "attn_conv_base": "attn_conv.base",
            "attn_conv_proj.weight": "attn_conv.proj.weight",
            "ffn_conv_base": "ffn_conv.base",
            "ffn_conv_proj.weight": "ffn_conv.proj.weight",
        },
    ),
    "early": ("dflash", {"dflash.target_layers": "dflash.target_layer_ids"}, {}),
}


def edited_gguf(
    source: Path,
    output: Path,
    *,
    architecture: str | None = None,
    set_keys: Mapping[str, Value] | None = None,
    without: tuple[str, ...] = (),
    rename_key: Callable[[str], str] = str,
    rename_tensor: Callable[[str], str] = str,
    drop_tensors: tuple[str, ...] = (),
    tensor_values: Mapping[str, np.ndarray] | None = None,
    alignment: int | None = None,
) -> Path:
    """Copy a GGUF with changes; `tensor_values` replaces or adds tensors (F32, F16 or I64 arrays)."""
    reader = GGUFReader(source)
    old = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(output, architecture or old)
    if alignment:
        writer.add_custom_alignment(alignment)
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture" or key in without or key in (set_keys or {}):
            continue
        element = field.types[-1] if field.types[0] is GGUFValueType.ARRAY else None
        writer.add_key_value(rename_key(key), field.contents(), field.types[0], element)
    for key, (value, kind, element) in (set_keys or {}).items():
        writer.add_key_value(key, value, kind, element)
    values = dict(tensor_values or {})
    for tensor in reader.tensors:
        if tensor.name in drop_tensors:
            continue
        if tensor.name in values:
            writer.add_tensor(tensor.name, values.pop(tensor.name))
        else:
            raw = None if tensor.tensor_type == GGMLQuantizationType.F32 else tensor.tensor_type
            writer.add_tensor(rename_tensor(tensor.name), np.asarray(tensor.data), raw_dtype=raw)
    for name, array in values.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return output


def make_fork(source: Path, output: Path, spelling: str = "flat", **edits: object) -> Path:
    """A converted drafter as a fork would have written it; `spelling` is a key of FORKS."""
    architecture, keys, tensors = FORKS[spelling]
    taps = tuple(int(tap) - 1 for tap in GGUFReader(source).fields["dflash.target_layers"].contents())

    def rename_key(key: str) -> str:
        return keys.get(key, key.replace("dflash.", f"{architecture}.", 1) if key.startswith("dflash.") else key)

    def rename_tensor(name: str) -> str:
        if not name.startswith("blk."):
            return tensors.get(name, name)
        block, layer, tail = name.split(".", 2)
        return f"{block}.{layer}.{tensors.get(tail, tail)}"

    set_keys = {keys["dflash.target_layers"]: (list(taps), GGUFValueType.ARRAY, GGUFValueType.INT32)}
    return edited_gguf(
        source,
        output,
        architecture=architecture,
        rename_key=rename_key,
        rename_tensor=rename_tensor,
        set_keys=set_keys,
        without=("dflash.target_layers",),
        **edits,
    )


def with_key(key: str, value: object, kind: GGUFValueType, element: GGUFValueType | None = None) -> dict[str, Value]:
    """`set_keys` with one key."""
    return {key: (value, kind, element)}


def tensor_bytes(path: Path) -> dict[str, tuple[tuple[int, ...], str, bytes]]:
    """Shape, type and bytes of every tensor, as the gguf package reads them."""
    return {
        tensor.name: (
            tuple(int(size) for size in tensor.shape),
            tensor.tensor_type.name,
            np.asarray(tensor.data).tobytes(),
        )
        for tensor in GGUFReader(path).tensors
    }


def data_section(path: Path) -> bytes:
    """Everything after the header."""
    return path.read_bytes()[GGUFReader(path).data_offset :]
