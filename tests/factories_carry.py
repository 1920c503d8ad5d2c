"""Targets changed in the tensors that drafters share, and what is in a converted file."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from gguf import GGUFWriter
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import quantize

from dflash2.gguf_info import GGUFInfo, read_gguf_info

# Bytes [rows, bytes per row] and their type.
Encoded = tuple[np.ndarray, GGMLQuantizationType]


def encoded(values: np.ndarray, kind: GGMLQuantizationType) -> Encoded:
    return np.ascontiguousarray(quantize(values, kind)).view(np.uint8).reshape(len(values), -1), kind


def random_head(vocab: int, hidden: int, kind: GGMLQuantizationType = GGMLQuantizationType.Q8_0, seed: int = 9):
    values = np.random.default_rng(seed).normal(0, hidden**-0.5, (vocab, hidden)).astype(np.float32)
    return encoded(values, kind)


def random_q6_k(rows: int, columns: int, seed: int = 5) -> Encoded:
    """Random codes and scales of the type; each block ends with its F16 scale."""
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType.Q6_K]
    data = np.random.default_rng(seed).integers(0, 256, (rows * columns // block, block_bytes), np.uint8)
    data[:, -2:] = np.array([1e-5], np.float16).view(np.uint8)
    return data.reshape(rows, -1), GGMLQuantizationType.Q6_K


def random_nvfp4(rows: int, columns: int, seed: int = 6) -> Encoded:
    """Random codes of the type with scales near 1; each block begins with four of them."""
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType.NVFP4]
    random = np.random.default_rng(seed)
    data = random.integers(0, 256, (rows * columns // block, block_bytes), np.uint8)
    data[:, :4] = random.integers(0x30, 0x40, (len(data), 4), np.uint8)
    return data.reshape(rows, -1), GGMLQuantizationType.NVFP4


def changed_gguf(
    source: Path, path: Path, tensors: Mapping[str, Encoded | None], *, tensors_per_file: int = 0, **metadata: object
) -> Path:
    """A copy of `source` with tensors added, replaced or (None) left out, and metadata (dots as two underscores).

    With `tensors_per_file` it is split; returned is its first file.
    """
    info = read_gguf_info(source)
    writer = GGUFWriter(path, info.architecture, split_max_tensors=tensors_per_file)
    changes = {key.replace("__", "."): value for key, value in metadata.items()}
    for key, stored in info.metadata.items():
        if key == "general.architecture":
            continue
        value, kind = changes.get(key, stored), info.value_types[key]
        writer.add_key_value(key, list(value) if isinstance(value, tuple) else value, kind.kind, kind.element)
    for tensor in info.tensors:
        if tensor.name not in tensors:
            kind = GGMLQuantizationType[tensor.type_name]
            shape = (*tensor.shape[:0:-1], -1)
            writer.add_tensor(tensor.name, tensor_bytes(info, tensor.name).reshape(shape), raw_dtype=kind)
    for name, replacement in tensors.items():
        if replacement is not None:
            writer.add_tensor(name, replacement[0], raw_dtype=replacement[1])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if not tensors_per_file else sorted(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))[0]


def tensor_bytes(info: GGUFInfo, name: str) -> np.ndarray:
    tensor = info.tensor(name)
    return np.fromfile(info.path, np.uint8, tensor.n_bytes, offset=tensor.offset)


def types_of(path: Path) -> dict[str, str]:
    return {tensor.name: tensor.type_name for tensor in read_gguf_info(path).tensors}
