"""A target that computes the same function at a real model's cost.

A target of a few million parameters is bound by arithmetic on a CPU, where a real one is bound by reading its weights:
verifying eight tokens then costs little more than one. The copy made here reads as many weights as asked for: its
feed-forward layers are widened with random gate and up rows whose down columns are zero, so they add exactly nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from filelock import FileLock
from gguf import GGUFWriter
from gguf.constants import GGMLQuantizationType, GGUFValueType, LlamaFileType
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray

from dflash2.cache import cache_folder
from dflash2.errors import GGUFError
from dflash2.gguf_info import GGUFInfo, MetadataValue, TensorInfo, ValueType, read_gguf_info

WeightType = Literal["f16", "q8_0", "q4_0", "f32"]

_TYPES = {
    "f16": (GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16),
    "q8_0": (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0),
    "q4_0": (GGMLQuantizationType.Q4_0, LlamaFileType.MOSTLY_Q4_0),
    "f32": (GGMLQuantizationType.F32, LlamaFileType.ALL_F32),
}
_ARCHITECTURES = ("qwen3",)
_CHUNK = 256  # new feed-forward rows come in multiples of this; every quantisation block divides it
_SCALE = 0.02  # deviation of the random rows: their activations stay far below the largest F16
_VERSION = 1  # part of the cache key; raised when the same arguments give another file


def scaled_target(target: Path, *, parameters: int = 150_000_000, weights: WeightType = "f16") -> Path:
    """Path of a copy of `target` with at least `parameters` parameters, made in the cache on the first call.

    Matrices are stored as `weights`; those of that type already are kept bit for bit, others are converted, so the
    function is the target's up to the rounding of that conversion, and independent of `parameters` (0: not widened).
    Raises GGUFError if the target is not a dense qwen3 model.
    """
    info = read_gguf_info(target)
    if info.architecture not in _ARCHITECTURES:
        raise GGUFError(f"{target}: only dense {', '.join(_ARCHITECTURES)} models can be cost-scaled.")
    models = cache_folder("models")
    path = models / f"{target.stem}-scaled-{_key(target, parameters, weights)}.gguf"
    with FileLock(path.with_suffix(".lock")):
        if not path.is_file():
            partial = path.with_suffix(".partial")
            _write(info, _Plan.of(info, parameters, weights), partial)
            partial.replace(path)
    return path


def _key(target: Path, parameters: int, weights: WeightType) -> str:
    digest = hashlib.sha256(f"{_VERSION} {parameters} {weights} ".encode())
    digest.update(target.read_bytes())
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class _Plan:
    """What changes: feed-forward width of the copy, type of its matrices."""

    width: int
    extra: int
    tensor_type: GGMLQuantizationType
    file_type: LlamaFileType

    @classmethod
    def of(cls, info: GGUFInfo, parameters: int, weights: WeightType) -> _Plan:
        width, layers, hidden = (
            info.integer(info.own(key)) or 0 for key in ("feed_forward_length", "block_count", "embedding_length")
        )
        missing = parameters - sum(int(np.prod(tensor.shape)) for tensor in info.tensors)
        rows = max(0, -(-missing // (3 * layers * hidden)))
        extra = -(-rows // _CHUNK) * _CHUNK
        return cls(width + extra, extra, *_TYPES[weights])


def _write(info: GGUFInfo, plan: _Plan, path: Path) -> None:
    writer = GGUFWriter(path, info.architecture)
    changed: dict[str, MetadataValue] = {
        "general.file_type": int(plan.file_type),
        info.own("feed_forward_length"): plan.width,
    }
    for key, value in info.metadata.items():
        if key != "general.architecture":  # the writer's own
            _add_metadata(writer, key, changed.get(key, value), info.value_types[key])
    random = np.random.default_rng(0)
    for tensor, rows, tensor_type in _tensors(info, plan, random):
        writer.add_tensor(tensor.name, rows, raw_dtype=tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_metadata(writer: GGUFWriter, key: str, value: MetadataValue, stored: ValueType) -> None:
    stored_value: object = value
    if stored.kind is GGUFValueType.STRING:
        stored_value = _text_bytes(value)
    elif stored.element is GGUFValueType.STRING and isinstance(value, tuple):
        stored_value = [_text_bytes(text) for text in value]
    writer.add_key_value(key, stored_value, stored.kind, stored.element)


def _text_bytes(text: object) -> bytes:
    """The text as it was stored: some vocabularies are not UTF-8."""
    return str(text).encode("utf-8", "surrogateescape")


def _tensors(
    info: GGUFInfo, plan: _Plan, random: np.random.Generator
) -> Iterator[tuple[TensorInfo, NDArray[np.uint8], GGMLQuantizationType]]:
    """Every tensor as rows of bytes, converted and widened, with its type."""
    data = np.memmap(info.path, np.uint8, "r")
    for tensor in info.tensors:
        stored = GGMLQuantizationType[tensor.type_name]
        raw = data[tensor.offset : tensor.offset + tensor.n_bytes]
        if len(tensor.shape) == 1:
            yield tensor, raw, stored
            continue
        rows = raw.reshape(tensor.shape[1], -1)
        if stored != plan.tensor_type:
            rows = _encode(dequantize(rows, stored), plan.tensor_type)
        yield tensor, _widen(tensor.name, rows, tensor.shape, plan, random), plan.tensor_type


def _widen(
    name: str, rows: NDArray[np.uint8], shape: tuple[int, ...], plan: _Plan, random: np.random.Generator
) -> NDArray[np.uint8]:
    """Append random rows to gate and up, zero columns to down; `shape` is in ggml order."""
    if plan.extra == 0:
        return rows
    if name.endswith((".ffn_gate.weight", ".ffn_up.weight")):
        noise = random.standard_normal((plan.extra, shape[0]), np.float32) * np.float32(_SCALE)
        return np.concatenate([rows, _encode(noise, plan.tensor_type)])
    if name.endswith(".ffn_down.weight"):
        silence = np.zeros((shape[1], plan.extra), np.float32)
        return np.concatenate([rows, _encode(silence, plan.tensor_type)], axis=1)
    return rows


def _encode(values: NDArray[np.float32], tensor_type: GGMLQuantizationType) -> NDArray[np.uint8]:
    """`values` [rows, columns] as rows of `tensor_type`'s bytes."""
    encoded = np.ascontiguousarray(quantize(values, tensor_type))
    return encoded.view(np.uint8).reshape(len(values), -1)
