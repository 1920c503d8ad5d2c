"""Checkpoints of compressed-tensors: formats, strategies and packing as that library defines them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from dflash2.converter.dialects.fields import Fields
from dflash2.converter.quantized import codes
from dflash2.converter.quantized.codes import Code, read_integers, read_scalar
from dflash2.converter.quantized.matrix import Grid, PackedZeroPoints, QuantizedMatrix, ZeroPoints, tiles_of
from dflash2.converter.quantized.module import (
    Module,
    ModuleReader,
    Shape,
    check_shape,
    grid_shapes,
    matrix_shape,
    read_scales,
)
from dflash2.converter.quantized.schemes import Scheme, choose, matches, read_names, read_scheme
from dflash2.converter.safetensors_file import StoredTensor
from dflash2.converter.sources import Source
from dflash2.errors import CheckpointError, UnsupportedCheckpointError

PARTS = (
    "weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx", "weight_global_scale",
)  # fmt: skip
_INTEGERS = ("I32", "I64")


def read_compressed_tensors(fields: Fields) -> ModuleReader:
    """A reader of the modules of a checkpoint with this quantization_config."""
    for key, harmless in (("transform_config", ()), ("sparsity_config", ("dense",))):
        section = fields.section(key)
        if section and section.get("format") not in harmless:
            raise UnsupportedCheckpointError(
                f"{fields.path}: '{fields.prefix}{key}' changes how weights are stored, which is not read; dequantise"
                " the checkpoint with compressed-tensors first, or convert the original."
            )
    schemes = tuple(
        scheme
        for name, group in fields.section("config_groups").items()
        if (scheme := read_scheme(fields, name, group)) is not None
    )
    for scheme in schemes:
        if scheme.format not in _FORMATS:
            raise UnsupportedCheckpointError(
                f"{fields.path}: the format {scheme.format!r} of compressed-tensors is not read (known:"
                f" {', '.join(_FORMATS)}); dequantise the checkpoint with compressed-tensors first, or convert the"
                " original."
            )
    ignore = read_names(fields, "ignore")

    def read(module: Module) -> Source:
        if matches(ignore, module, fields.path):
            raise CheckpointError(
                f"{module.label} is quantised, but '{fields.prefix}ignore' of {fields.path.name}"
                " says it is not; download both again."
            )
        scheme = choose(schemes, module, fields.path)
        return _FORMATS[scheme.format](module, scheme)

    return read


def _require(scheme: Scheme, module: Module, kinds: Mapping[tuple[str, int], Code]) -> Code:
    code = kinds.get((scheme.kind, scheme.bits))
    if code is None:
        known = " or ".join(f"{kind}{bits}" for kind, bits in kinds)
        raise UnsupportedCheckpointError(
            f"{module.label} is {scheme.kind}{scheme.bits} in the format {scheme.format}, which"
            f" is not read ({known} is); convert the original."
        )
    return code


def _check_groups(scheme: Scheme, tensor: StoredTensor, shape: Shape) -> None:
    if scheme.strategy.endswith("group") and shape[1] % scheme.group_size:
        raise CheckpointError(
            f"{tensor.path}: tensor {tensor.name!r} has {shape[1]} columns, which groups of {scheme.group_size}"
            f" ({scheme.where + '.group_size'!r}) do not divide."
        )


def _plain_codes(
    module: Module, scheme: Scheme, kinds: Mapping[tuple[str, int], Code], scale_dtypes: Collection[str]
) -> Source:
    """One weight a byte under the name `weight`."""
    code = _require(scheme, module, kinds)
    tensor = module.part("weight", (code.dtype,))
    shape = matrix_shape(tensor, code)
    _check_groups(scheme, tensor, shape)
    tile = scheme.tile(shape)
    scales = read_scales(module, "weight_scale", shape, tile, scale_dtypes)
    zero_points: Grid | None = None
    if not scheme.symmetric:
        if code is not codes.INT8:
            raise UnsupportedCheckpointError(
                f"{tensor.path}: tensor {tensor.name!r} has float weights with zero points; convert the original."
            )
        zeros = module.part("weight_zero_point", ("I8",))
        check_shape(zeros, *grid_shapes(shape, tile))
        zero_points = ZeroPoints(zeros, tile, codes.INT8)
    return QuantizedMatrix(shape, tensor, code, scales, zero_points)


_INT_CODES = {("int", 8): codes.INT8}
_FLOAT_CODES = {("float", 8): codes.E4M3}
_PACKED_CODES = {("int", 4): codes.PACKED_INT4, ("int", 8): codes.PACKED_INT8}
_FP4_CODES = {("float", 4): codes.E2M1}


def _int_quantized(module: Module, scheme: Scheme) -> Source:
    return _plain_codes(module, scheme, _INT_CODES, codes.SCALE_FLOATS)


def _float_quantized(module: Module, scheme: Scheme) -> Source:
    return _plain_codes(module, scheme, _FLOAT_CODES, codes.SCALE_FLOATS)


def _naive_quantized(module: Module, scheme: Scheme) -> Source:
    return _plain_codes(module, scheme, _INT_CODES | _FLOAT_CODES, codes.SCALE_FLOATS)


def _mxfp8_quantized(module: Module, scheme: Scheme) -> Source:
    return _plain_codes(module, scheme, _FLOAT_CODES, codes.SCALE_EXPONENTS)


def _pack_quantized(module: Module, scheme: Scheme) -> Source:
    """Integers packed along the columns into 32-bit words; zero points, if any, along the rows."""
    code = _require(scheme, module, _PACKED_CODES)
    tensor = module.part("weight_packed", ("I32",))
    shape = _stored_shape(module, tensor, 4 * code.per_byte)
    _check_groups(scheme, tensor, shape)
    tile = scheme.tile(shape)
    scales = read_scales(module, "weight_scale", shape, tile)
    zero_points = None if scheme.symmetric else _packed_zero_points(module, scheme, code, shape)
    groups = _activation_order(module, scheme, shape)
    return QuantizedMatrix(shape, tensor, code, scales, zero_points, groups)


def _stored_shape(module: Module, packed: StoredTensor, per_word: int) -> Shape:
    """The matrix's shape from `weight_shape`, which packing to whole words hides."""
    words = matrix_shape(packed, codes.INT8)
    tensor = module.part("weight_shape", _INTEGERS)
    check_shape(tensor, (2,))
    rows, columns = (int(size) for size in read_integers(tensor))
    if rows != words[0] or columns < 1 or tiles_of((rows, columns), (1, per_word)) != words:
        raise CheckpointError(
            f"{tensor.path}: tensor {tensor.name!r} says [{rows}, {columns}], which does not fit the shape"
            f" {list(packed.shape)} of {packed.name!r}; download the checkpoint again."
        )
    return rows, columns


def _packed_zero_points(module: Module, scheme: Scheme, code: Code, shape: Shape) -> Grid:
    tile = scheme.tile(shape)
    if scheme.strategy == "tensor":
        zeros = module.part("weight_zero_point", ("I8",))
        check_shape(zeros, *grid_shapes(shape, tile))
        return ZeroPoints(zeros, tile, codes.INT8)
    zeros = module.part("weight_zero_point", ("I32",))
    down, across = tiles_of(shape, (4 * code.per_byte, tile[1]))
    check_shape(zeros, (down, across))
    if tile[0] != 1:
        raise UnsupportedCheckpointError(
            f"{zeros.path}: tensor {zeros.name!r} has packed zero points per block; convert the original."
        )
    return PackedZeroPoints(zeros, tile[1], code)


def _activation_order(module: Module, scheme: Scheme, shape: Shape) -> npt.NDArray[np.int64] | None:
    """The group of each column; None if groups are neighbouring columns (absent, or all -1)."""
    if not scheme.reordered and "weight_g_idx" not in module.parts:
        return None
    tensor = module.part("weight_g_idx", _INTEGERS)
    check_shape(tensor, (shape[1],))
    groups = read_integers(tensor)
    if (groups == -1).all():
        return None
    across = tiles_of(shape, scheme.tile(shape))[1]
    if groups.min() < 0 or groups.max() >= across or np.unique(groups).size != across:
        raise CheckpointError(
            f"{tensor.path}: tensor {tensor.name!r} does not name each of {across} groups; download it again."
        )
    return groups


def _fp4(module: Module, scheme: Scheme, scale_dtypes: Collection[str]) -> QuantizedMatrix:
    code = _require(scheme, module, _FP4_CODES)
    tensor = module.part("weight_packed", (code.dtype,))
    shape = matrix_shape(tensor, code)
    _check_groups(scheme, tensor, shape)
    if not scheme.symmetric:
        raise UnsupportedCheckpointError(
            f"{tensor.path}: tensor {tensor.name!r} has float weights with zero points; convert the original."
        )
    scales = read_scales(module, "weight_scale", shape, scheme.tile(shape), scale_dtypes)
    return QuantizedMatrix(shape, tensor, code, scales)


def _nvfp4(module: Module, scheme: Scheme) -> Source:
    """Scales are E4M3, divided by one F32 number for the whole tensor."""
    matrix = _fp4(module, scheme, ("F8_E4M3",))
    global_scale = read_scalar(module.part("weight_global_scale", ("F32",)), divisor=True)
    return replace(matrix, scales=replace(matrix.scales, per_tensor=global_scale, inverse=True))


def _mxfp4(module: Module, scheme: Scheme) -> Source:
    return _fp4(module, scheme, codes.SCALE_EXPONENTS)


_FORMATS: dict[str, Callable[[Module, Scheme], Source]] = {
    "pack-quantized": _pack_quantized,
    "int-quantized": _int_quantized,
    "float-quantized": _float_quantized,
    "naive-quantized": _naive_quantized,
    "nvfp4-pack-quantized": _nvfp4,
    "mxfp4-pack-quantized": _mxfp4,
    "mxfp8-quantized": _mxfp8_quantized,
}
