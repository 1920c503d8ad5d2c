"""Checkpoints of one quantised module, part by part, without the libraries that would make them."""

import json
from pathlib import Path

import numpy as np
from factories import safetensors_bytes

from dflash2.converter.quantized import open_quantized
from dflash2.converter.safetensors_file import read_safetensors
from dflash2.converter.sources import row_count

MODULE = "layers.0.mlp.down_proj"
# dtype as the file names it, and the bytes as numpy has them.
Tensors = dict[str, tuple[str, np.ndarray]]


def saved(tensors: Tensors) -> bytes:
    """A safetensors file of any dtypes, without torch."""
    header, data = {}, b""
    for name, (dtype, values) in tensors.items():
        offsets = [len(data), len(data) + values.nbytes]
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": offsets}
        data += values.tobytes()
    return safetensors_bytes(json.dumps(header), data)


def read_all(folder: Path, quantization: object, parts: Tensors) -> list[np.ndarray]:
    """Open a checkpoint of one quantised module and read every row."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.safetensors"
    path.write_bytes(saved({f"{MODULE}.{part}": tensor for part, tensor in parts.items()}))
    stored = {tensor.name: tensor for tensor in read_safetensors(path)}
    sources, _ = open_quantized({"quantization_config": quantization}, folder, stored)
    return [source.rows(0, row_count(source)) for source in sources.values()]
