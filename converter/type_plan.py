"""Which type every tensor gets: the output type, what its shape and name allow, and what the user says."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import translate

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from dflash2.converter.encoding import EncodedTensor
from dflash2.converter.outtypes import DIRECT_TYPES, TENSOR_TYPES, OutputType, parse_tensor_type
from dflash2.converter.plan import PlannedTensor
from dflash2.errors import OutputError

_Type = GGMLQuantizationType

# (pattern, type name): the first pattern that fits a tensor's name decides.
TensorTypes = Sequence[tuple[str, str]]

_DIRECT = frozenset(map(parse_tensor_type, DIRECT_TYPES))
_FLOATS = (_Type.F32, _Type.F16, _Type.BF16)
# As upstream: rows that are no multiple of the block size.
_FALLBACK = _Type.F16
# Largest magnitude that llama.cpp's quantiser takes: the scales of its blocks are F16.
_LARGEST_QUANTISED = 65504.0
_CODEBOOKS = ("selector_predecessor.weight", "selector_successor.weight")
# What two and three bits harm most, for its size (docs/quantization.md); llama.cpp's mixtures know none of them.
_TENDER = re.compile(r"^(fc|selector_\w+|blk\.\d+\.(attn|ffn)_conv_proj)\.weight$")
_FEW_BITS = (_Type.Q2_K, _Type.Q3_K, _Type.IQ3_S)
# Mixtures that would give short rows IQ4_NL, which CUDA looks up only in rows of a multiple of 256.
_SHORT_ROWS_TO_IQ4_NL = (_Type.IQ4_XS, _Type.IQ4_NL)
_LONG_ROW = 256
# Multiplies the target's hidden states, which may not fit F16: backends round them to the type of a F16 matrix.
_PROJECTION = "fc.weight"
_MAX_PATTERN = 1000  # characters
_LAYER = re.compile(r"^blk\.\d+\.")


@dataclass(frozen=True)
class TypePlan:
    """`tensors` as this package encodes them; with `by_llama_cpp`, llama.cpp's quantiser then takes its turn.

    Then `tensors` hold the checkpoint's exact values, and `fixed` are (tensor name, type) pairs that are not left to
    the mixture `outtype`. `said` are the tensors whose type the user named.
    """

    outtype: OutputType
    tensors: tuple[EncodedTensor, ...]
    said: frozenset[str]
    by_llama_cpp: bool = False
    fixed: tuple[tuple[str, GGMLQuantizationType], ...] = ()

    def notes(self, types: Mapping[str, GGMLQuantizationType]) -> tuple[str, ...]:
        """A sentence about matrices whose rows do not hold the wanted type's blocks; `types` are those of the file."""
        block = GGML_QUANT_SIZES[self.outtype.tensor_type][0]
        stored: dict[str, dict[str, None]] = {}
        for tensor in map(_planned, self.tensors):
            if _is_matrix(tensor) and tensor.name not in self.said and tensor.shape[-1] % block:
                stored.setdefault(types[tensor.name].name, {})[_LAYER.sub("blk.*.", tensor.name)] = None
        if not stored:
            return ()
        instead = "; ".join(f"{name} for {', '.join(tensors)}" for name, tensors in sorted(stored.items()))
        return (f"rows of some tensors do not hold {self.outtype.tensor_type.name}'s blocks of {block}: {instead}.",)


def plan_types(tensors: Sequence[PlannedTensor], outtype: OutputType, tensor_types: TensorTypes) -> TypePlan:
    """Give every tensor its type.

    Vectors, norms and tensors without `.weight` stay F32, token ids and copies of the target's as they are. Raises
    OutputError for a pattern that fits no matrix, and for a type that the rows of a tensor do not hold.
    """
    said = _said(tensors, tensor_types)
    names = frozenset(said)
    if not outtype.direct:
        fixed = {t.name: spared for t in tensors if (spared := _spared(t, outtype)) is not None} | said
    else:
        # Should llama.cpp be needed: its mixture has no say, every matrix is named.
        fixed = {tensor.name: _own_type(tensor, outtype) for tensor in tensors if _is_matrix(tensor)} | said
        if _DIRECT.issuperset(fixed.values()):
            encoded = (EncodedTensor(t, fixed[t.name] if t.name in fixed else _own_type(t, outtype)) for t in tensors)
            return TypePlan(outtype, tuple(encoded), names)
    exact = tuple(_exact(tensor, fixed) for tensor in tensors)
    return TypePlan(outtype, exact, names, by_llama_cpp=True, fixed=tuple(fixed.items()))


def _planned(tensor: EncodedTensor) -> PlannedTensor:
    return tensor.planned


def _is_matrix(tensor: PlannedTensor) -> bool:
    """Whether its type may be chosen: the rule of llama.cpp's quantiser, as far as a drafter's names go."""
    return (
        len(tensor.shape) > 1
        and tensor.name.endswith(".weight")
        and not tensor.name.endswith("_norm.weight")
        and not tensor.source.fixed_type
    )


def _own_type(tensor: PlannedTensor, outtype: OutputType) -> GGMLQuantizationType:
    if tensor.source.fixed_type and tensor.source.raw_type is not None:
        return tensor.source.raw_type
    if not _is_matrix(tensor):
        return _Type.F32
    wanted = outtype.tensor_type if _holds(tensor, outtype.tensor_type) else _FALLBACK
    if tensor.name == _PROJECTION and wanted is _Type.F16:
        return _Type.BF16 if tensor.source.raw_type is _Type.BF16 else _Type.F32
    return wanted


def _spared(tensor: PlannedTensor, outtype: OutputType) -> GGMLQuantizationType | None:
    """The type of a matrix where llama.cpp's mixture would do harm; None leaves it to the mixture."""
    if outtype.tensor_type in _FEW_BITS and _TENDER.match(tensor.name):
        return next((spared for spared in (_Type.Q4_K, _Type.Q5_0) if _holds(tensor, spared)), None)
    short = tensor.name in _CODEBOOKS and tensor.shape[-1] % _LONG_ROW
    if short and outtype.tensor_type in _SHORT_ROWS_TO_IQ4_NL and _holds(tensor, _Type.Q8_0):
        return _Type.Q8_0
    return None


def _exact(tensor: PlannedTensor, fixed: Mapping[str, GGMLQuantizationType]) -> EncodedTensor:
    """As the checkpoint stores it, F32 where values are computed."""
    raw_type = tensor.source.raw_type
    if not _is_matrix(tensor):
        return EncodedTensor(tensor, raw_type if tensor.source.fixed_type and raw_type is not None else _Type.F32)
    limit = None if fixed.get(tensor.name) in (_Type.F32, _Type.BF16) else _LARGEST_QUANTISED
    return EncodedTensor(tensor, raw_type if raw_type in _FLOATS else _Type.F32, limit)


def _holds(tensor: PlannedTensor, wanted: GGMLQuantizationType) -> bool:
    return tensor.shape[-1] % GGML_QUANT_SIZES[wanted][0] == 0


def _said(tensors: Sequence[PlannedTensor], tensor_types: TensorTypes) -> dict[str, GGMLQuantizationType]:
    """Type of every tensor that a pattern fits."""
    matrices = {tensor.name: tensor for tensor in tensors if _is_matrix(tensor)}
    said: dict[str, GGMLQuantizationType] = {}
    for pattern, type_name in tensor_types:
        wanted = parse_tensor_type(type_name)
        if len(pattern) > _MAX_PATTERN:
            raise OutputError(
                f"The tensor type pattern {pattern[:20]!r}... has {len(pattern)} characters; shorten it to"
                f" {_MAX_PATTERN} at most."
            )
        fitting = _fitting(pattern, matrices)
        if not fitting:
            raise _fits_nothing(pattern, tensors, matrices)
        if all(said.get(name, wanted) != wanted for name in fitting):
            raise OutputError(
                f"The tensor type {pattern}={type_name} changes nothing: patterns before it give every matrix that it"
                f" fits another type ({fitting[0]} is {said[fitting[0]].name}); put the narrower pattern first, or"
                " leave one out."
            )
        for name in fitting:
            if name not in said and not _holds(matrices[name], wanted):
                raise _does_not_hold(matrices[name], wanted)
            said.setdefault(name, wanted)
    return said


def _fitting(pattern: str, names: Iterable[str]) -> list[str]:
    """Names in which `pattern` is found as a regular expression (as llama-quantize does), else as a glob."""
    for expression in (pattern, translate(f"*{pattern}*")):
        try:
            found = re.compile(expression, re.IGNORECASE)
        except (re.error, RecursionError, OverflowError):
            continue
        if fitting := [name for name in names if found.search(name)]:
            return fitting
    return []


def _fits_nothing(pattern: str, tensors: Sequence[PlannedTensor], matrices: Iterable[str]) -> OutputError:
    names = sorted({_LAYER.sub("blk.*.", name) for name in matrices})
    others = _fitting(pattern, [tensor.name for tensor in tensors])
    why = f"only fits {others[0]}, whose type is never changed" if others else "fits no tensor"
    return OutputError(f"The tensor type pattern {pattern!r} {why}; the matrices are {', '.join(names)}.")


def _does_not_hold(tensor: PlannedTensor, wanted: GGMLQuantizationType) -> OutputError:
    width, block = tensor.shape[-1], GGML_QUANT_SIZES[wanted][0]
    fit = ", ".join(
        name for name in TENSOR_TYPES if width % GGML_QUANT_SIZES[GGMLQuantizationType[name.upper()]][0] == 0
    )
    return OutputError(
        f"Tensor {tensor.name!r} has rows of {width} values, which do not hold the blocks of {block} of {wanted.name};"
        f" choose one of {fit}."
    )
