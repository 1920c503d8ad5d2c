"""Weights quantised by the libraries that define the formats, saved as they save them."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam, maybe_pad_tensor_for_block_quant
from safetensors.torch import save_file

from dflash2.converter.quantized import open_quantized
from dflash2.converter.safetensors_file import read_safetensors
from dflash2.converter.sources import Source, row_count

State = dict[str, torch.Tensor]
MODULE = "layers.0.mlp.down_proj"
MX_FORMATS = ("mxfp4-pack-quantized", "mxfp8-quantized")


def random_weight(shape: tuple[int, int], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Weights with a few outliers, an all-zero row and a negative zero."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.05
    weight[0, ::7] *= 40
    weight[shape[0] // 2] = 0
    weight[0, 1] = -0.0
    return weight.to(dtype)


def weight_scheme(format_name: str, **weights: object) -> QuantizationScheme:
    """A config group of compressed-tensors for `Linear` modules."""
    return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights), format=format_name)


def compress(weight: torch.Tensor, scheme: QuantizationScheme) -> State:
    """The parts that compressed-tensors stores for `weight`, scales in the weight's dtype."""
    args = scheme.weights
    tiles = _tiles(weight, args)
    low, high = tiles.amin(-1), tiles.amax(-1)
    state = {"weight": weight}
    if scheme.format == "nvfp4-pack-quantized":
        state["weight_global_scale"] = generate_gparam(low.min(), high.max()).reshape(1)
    scale, zero_point = calculate_qparams(low, high, args, global_scale=state.get("weight_global_scale"))
    state |= {"weight_scale": scale.to(weight.dtype), "weight_zero_point": zero_point}
    if scheme.format in MX_FORMATS:
        state["weight_scale"] = scale.to(torch.float32)
    return BaseCompressor.get_value_from_registry(scheme.format).compress(state, scheme)


def pack(integers: torch.Tensor, scheme: QuantizationScheme) -> State:
    """`weight_packed` and `weight_shape` of weights that are already integers."""
    state = {"weight": integers, "weight_scale": torch.ones(_tiles(integers, scheme.weights).shape[:-1])}
    return BaseCompressor.get_value_from_registry(scheme.format).compress(state, scheme)


def decompress(state: State, scheme: QuantizationScheme) -> torch.Tensor:
    """What compressed-tensors makes of stored parts, in the dtype it chooses."""
    return BaseCompressor.get_value_from_registry(scheme.format).decompress(dict(state), scheme)["weight"]


def _tiles(weight: torch.Tensor, args: QuantizationArgs) -> torch.Tensor:
    """[..., values that share a scale], in the shape in which the scales are stored."""
    rows, columns = weight.shape
    if args.strategy == "tensor":
        return weight.reshape(1, -1)
    if args.strategy == "channel":
        return weight.reshape(rows, 1, columns)
    if args.strategy == "block":
        height, width = args.block_structure
        padded = maybe_pad_tensor_for_block_quant(weight, (height, width))
        down, across = padded.shape[0] // height, padded.shape[1] // width
        return padded.reshape(down, height, across, width).transpose(1, 2).reshape(down, across, -1)
    return weight.reshape(rows, -1, args.group_size)


def quantization_config(scheme: QuantizationScheme, **changes: object) -> dict:
    """quantization_config as the library writes it."""
    group = scheme.model_dump(mode="json")
    config = {"config_groups": {"group_0": group}, "format": scheme.format, "ignore": ["lm_head"]}
    return config | {"quant_method": "compressed-tensors", "quantization_status": "compressed"} | changes


def open_parts(
    folder: Path, config: Mapping, parts: State, extra: State | None = None
) -> tuple[dict[str, Source], tuple[str, ...]]:
    """Save one quantised module (and `extra` tensors under full names) and open the checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"{MODULE}.{part}": tensor.contiguous() for part, tensor in parts.items()} | (extra or {})
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    stored = {tensor.name: tensor for tensor in read_safetensors(folder / "model.safetensors")}
    return open_quantized(config, folder, stored)


def all_rows(source: Source, step: int | None = None) -> torch.Tensor:
    """Every row, `step` at a time."""
    n_rows = row_count(source)
    step = step or n_rows
    pieces = [source.rows(start, min(step, n_rows - start)) for start in range(0, n_rows, step)]
    return torch.from_numpy(np.concatenate(pieces))


def same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Equal bit for bit, once ours is rounded to the dtype of theirs."""
    integers = {4: torch.int32, 2: torch.int16}[theirs.element_size()]
    return torch.equal(ours.to(theirs.dtype).view(integers), theirs.view(integers))
