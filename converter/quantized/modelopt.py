"""Checkpoints exported by nvidia-modelopt: FP8 and NVFP4, described in config.json or in hf_quant_config.json."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from dflash2.converter.dialects.fields import Fields
from dflash2.converter.quantized import codes
from dflash2.converter.quantized.matrix import QuantizedMatrix
from dflash2.converter.quantized.module import Module, ModuleReader, matrix_shape, read_scales
from dflash2.converter.sources import Source
from dflash2.errors import CheckpointError, UnsupportedCheckpointError

PARTS = ("weight_scale", "weight_scale_2")
_MIXED = "MIXED_PRECISION"
_GROUP = 16


def read_modelopt(fields: Fields) -> ModuleReader:
    """A reader of the modules of a checkpoint with this description."""
    algorithm = fields.text("quant_algo")
    if algorithm is None:
        # Only the cache is quantised.
        return lambda module: _undescribed(module, fields)
    if algorithm != _MIXED:
        return _reader(fields, algorithm)
    readers: dict[str, ModuleReader] = {}
    for name, layer in fields.section("quantized_layers").items():
        if not isinstance(layer, dict):
            raise fields.wrong(f"quantized_layers.{name}", "is not a JSON object")
        scope = Fields(fields.path, (layer,), f"{fields.prefix}quantized_layers.{name}.")
        readers[name] = _reader(scope, scope.text("quant_algo"))
    return lambda module: _named(readers, module, fields)(module)


def _undescribed(module: Module, fields: Fields) -> Source:
    raise CheckpointError(
        f"{module.label} is quantised, but {fields.path} has no '{fields.prefix}quant_algo'; download both again."
    )


def _named(readers: dict[str, ModuleReader], module: Module, fields: Fields) -> ModuleReader:
    for name in module.names:
        if name in readers:
            return readers[name]
    raise CheckpointError(
        f"{module.label} is quantised, but '{fields.prefix}quantized_layers' in {fields.path}"
        " does not name it; download both again."
    )


def _reader(fields: Fields, algorithm: str | None) -> ModuleReader:
    if algorithm not in _ALGORITHMS:
        raise UnsupportedCheckpointError(
            f"{fields.path}: '{fields.prefix}quant_algo' {algorithm!r} of modelopt is not read (known:"
            f" {', '.join(_ALGORITHMS)}); convert the BF16 original."
        )
    group = fields.optional_integer("group_size", minimum=0) or _GROUP
    return lambda module: _ALGORITHMS[algorithm](module, group)


def _fp8(module: Module, _group: int) -> Source:
    """One scale per tensor."""
    tensor = module.part("weight", (codes.E4M3.dtype,))
    shape = matrix_shape(tensor, codes.E4M3)
    scales = read_scales(module, "weight_scale", shape, shape)
    return QuantizedMatrix(shape, tensor, codes.E4M3, scales)


def _fp8_per_channel(module: Module, _group: int) -> Source:
    """One scale per row."""
    tensor = module.part("weight", (codes.E4M3.dtype,))
    shape = matrix_shape(tensor, codes.E4M3)
    scales = read_scales(module, "weight_scale", shape, (1, shape[1]))
    return QuantizedMatrix(shape, tensor, codes.E4M3, scales)


def _nvfp4(module: Module, group: int) -> Source:
    """An E4M3 scale per group of a row, times one F32 scale for the whole tensor."""
    code = codes.E2M1_UNSIGNED_ZERO
    tensor = module.part("weight", (code.dtype,))
    shape = matrix_shape(tensor, code)
    if shape[1] % group:
        raise CheckpointError(
            f"{tensor.path}: tensor {tensor.name!r} has {shape[1]} columns, which groups of {group} do not divide."
        )
    scales = read_scales(module, "weight_scale", shape, (1, group), (codes.E4M3.dtype,))
    per_tensor = codes.read_scalar(module.part("weight_scale_2", ("F32",)))
    return QuantizedMatrix(shape, tensor, code, replace(scales, per_tensor=per_tensor))


_ALGORITHMS: dict[str, Callable[[Module, int], Source]] = {
    "FP8": _fp8,
    "FP8_PER_CHANNEL_PER_TOKEN": _fp8_per_channel,
    "NVFP4": _nvfp4,
    "W4A16_NVFP4": _nvfp4,
}
