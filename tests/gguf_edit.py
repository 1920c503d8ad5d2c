"""Copies of a GGUF with some of its metadata and tensors changed."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from gguf import GGUFReader, GGUFWriter
from gguf.constants import GGMLQuantizationType, GGUFValueType
from gguf.quants import quantize

from dflash2.gguf_info import ValueType, read_gguf_info


def edit_gguf(
    source: Path,
    path: Path,
    *,
    metadata: Mapping[str, object] | None = None,
    without: Iterable[str] = (),
    tensors: Mapping[str, tuple[np.ndarray, GGMLQuantizationType] | None] | None = None,
    architecture: str | None = None,
) -> Path:
    """Write `source` to `path` with keys of `metadata` set, keys of `without` left out, and `tensors` replaced.

    A key is stored as the type it has in `source`, a new one as the type its value suggests. A tensor is given by its
    values and the type to store them as, or by None to leave it out.
    """
    info, metadata, tensors = read_gguf_info(source), dict(metadata or {}), dict(tensors or {})
    writer = GGUFWriter(path, architecture or info.architecture)
    for key, stored in {**info.metadata, **metadata}.items():
        if key in without or key == "general.architecture":
            continue
        name = key.replace(f"{info.architecture}.", f"{architecture}.", 1) if architecture else key
        value = metadata.get(key, stored)
        kind, element = _type_of(value) if key not in info.value_types else _stored_type(info.value_types[key])
        writer.add_key_value(name, list(value) if element is not None else value, kind, element)
    for tensor in GGUFReader(source).tensors:
        if tensor.name not in tensors:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    for name, replacement in tensors.items():
        if replacement is not None:
            values, kind = replacement
            packed = values if values.dtype == np.int64 else quantize(values.astype(np.float32), kind)
            writer.add_tensor(name, packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _type_of(value: object) -> tuple[GGUFValueType, GGUFValueType | None]:
    if isinstance(value, list | tuple):
        return GGUFValueType.ARRAY, _type_of(value[0])[0]
    if type(value) is int:
        return GGUFValueType.UINT32 if value >= 0 else GGUFValueType.INT32, None
    return GGUFValueType.get_type(value), None


def values_of(path: Path, name: str) -> np.ndarray:
    """Values of one tensor of a GGUF as F32."""
    from gguf.quants import dequantize

    tensor = next(tensor for tensor in GGUFReader(path).tensors if tensor.name == name)
    return dequantize(tensor.data, tensor.tensor_type)


def _stored_type(stored: ValueType) -> tuple[GGUFValueType, GGUFValueType | None]:
    return stored.kind, stored.element
