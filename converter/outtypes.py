"""The types a user may ask for, under the names that llama-quantize gives them, and why the others are refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gguf.constants import GGMLQuantizationType, LlamaFileType

from dflash2.errors import OutputError

_Type, _File = GGMLQuantizationType, LlamaFileType


@dataclass(frozen=True)
class OutputType:
    """Type of a whole file: what `general.file_type` says, and the type that most of its matrices get.

    `direct` types are encoded here; the others are mixtures that llama.cpp's quantiser makes.
    """

    name: str
    file_type: LlamaFileType
    tensor_type: GGMLQuantizationType
    direct: bool = False


_ALL = (
    OutputType("f32", _File.ALL_F32, _Type.F32, direct=True),
    OutputType("f16", _File.MOSTLY_F16, _Type.F16, direct=True),
    OutputType("bf16", _File.MOSTLY_BF16, _Type.BF16, direct=True),
    OutputType("q8_0", _File.MOSTLY_Q8_0, _Type.Q8_0, direct=True),
    OutputType("q6_k", _File.MOSTLY_Q6_K, _Type.Q6_K),
    OutputType("q5_k_m", _File.MOSTLY_Q5_K_M, _Type.Q5_K),
    OutputType("q5_k_s", _File.MOSTLY_Q5_K_S, _Type.Q5_K),
    OutputType("q5_1", _File.MOSTLY_Q5_1, _Type.Q5_1),
    OutputType("q5_0", _File.MOSTLY_Q5_0, _Type.Q5_0),
    OutputType("q4_k_m", _File.MOSTLY_Q4_K_M, _Type.Q4_K),
    OutputType("q4_k_s", _File.MOSTLY_Q4_K_S, _Type.Q4_K),
    OutputType("iq4_nl", _File.MOSTLY_IQ4_NL, _Type.IQ4_NL),
    OutputType("iq4_xs", _File.MOSTLY_IQ4_XS, _Type.IQ4_XS),
    OutputType("q4_1", _File.MOSTLY_Q4_1, _Type.Q4_1),
    OutputType("q4_0", _File.MOSTLY_Q4_0, _Type.Q4_0),
    OutputType("q3_k_l", _File.MOSTLY_Q3_K_L, _Type.Q3_K),
    OutputType("q3_k_m", _File.MOSTLY_Q3_K_M, _Type.Q3_K),
    OutputType("q3_k_s", _File.MOSTLY_Q3_K_S, _Type.Q3_K),
    OutputType("iq3_m", _File.MOSTLY_IQ3_M, _Type.IQ3_S),
    OutputType("iq3_s", _File.MOSTLY_IQ3_S, _Type.IQ3_S),
    OutputType("q2_k", _File.MOSTLY_Q2_K, _Type.Q2_K),
)
_BY_NAME: Mapping[str, OutputType] = {outtype.name: outtype for outtype in _ALL}
_ALIASES = {"q3_k": "q3_k_m", "q4_k": "q4_k_m", "q5_k": "q5_k_m"}
OUT_TYPES: tuple[str, ...] = tuple(_BY_NAME)
DIRECT_TYPES: tuple[str, ...] = tuple(outtype.name for outtype in _ALL if outtype.direct)

# Types of single tensors; a superset of what a mixture is made of.
_TENSOR_TYPES: Mapping[str, GGMLQuantizationType] = {
    outtype.tensor_type.name.lower(): outtype.tensor_type for outtype in _ALL
}
TENSOR_TYPES: tuple[str, ...] = tuple(_TENSOR_TYPES)

_NEEDS_IMATRIX = "needs an importance matrix, which a drafter has none of"
_FEW_VALUES = "is for models trained with weights of two or three values"
_REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        ("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq2_m", "iq3_xxs", "iq3_xs", "q2_k_s"), _NEEDS_IMATRIX
    ),
    **dict.fromkeys(("tq1_0", "tq2_0", "q1_0", "q2_0"), _FEW_VALUES),
    "mxfp4_moe": "is for experts, which a drafter does not have",
    "copy": "copies the types of its input; name the type of the checkpoint, as bf16",
}


def parse_outtype(name: str) -> OutputType:
    """The output type called `name`, in any case; raises OutputError for one that is unknown or not possible."""
    known = name.lower()
    known = _ALIASES.get(known, known)
    if known in _BY_NAME:
        return _BY_NAME[known]
    raise _no_type("Output type", name, OUT_TYPES)


def parse_tensor_type(name: str) -> GGMLQuantizationType:
    """The type of one tensor called `name`, in any case; raises OutputError likewise."""
    if name.lower() in _TENSOR_TYPES:
        return _TENSOR_TYPES[name.lower()]
    raise _no_type("Tensor type", name, TENSOR_TYPES)


def _no_type(what: str, name: str, choices: tuple[str, ...]) -> OutputError:
    reason = _REFUSED.get(name.lower(), "is not known")
    return OutputError(f"{what} {name!r} {reason}; choose one of {', '.join(choices)}.")
