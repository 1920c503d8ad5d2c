"""Rotary embedding of a Hugging Face config, kept exactly as llama.cpp's dflash graph can compute it, or refused.

What that graph reads (pinned source, src/models/dflash.cpp and llama-context.cpp): freq_base, dimension_count,
scaling type/factor/original_context_length/attn_factor and the tensor rope_freqs. YaRN's beta_fast and beta_slow
keys are never read (32 and 1 are used), and M-RoPE ignores rope_freqs.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from dflash2.converter.config import Rope, RopeScaling
from dflash2.converter.fields import Fields
from dflash2.errors import UnsupportedCheckpointError

_LAYER_KINDS = ("full_attention", "sliding_attention")
# Values that llama.cpp uses whatever the file says; anything else would be lost in silence.
_FIXED_YARN = {"beta_fast": 32.0, "beta_slow": 1.0, "extrapolation_factor": 1.0, "truncate": True}


def read_rope(config: Fields, head_dim: int) -> Rope:
    """Rope of a config; raises UnsupportedCheckpointError for a type or parameter that cannot be kept."""
    fields = _rope_fields(config)
    theta = fields.number("rope_theta")
    dimensions = _rotated_dimensions(fields, head_dim)
    kind = fields.text("rope_type") or fields.text("type") or "default"
    reader = _SCALINGS.get(kind)
    if reader is None:
        raise UnsupportedCheckpointError(
            f"{config.path}: rope type {kind!r} cannot be kept; supported are {', '.join(sorted(_SCALINGS))}."
        )
    scaling, factors = reader(fields, theta, dimensions)
    if factors and dimensions != head_dim:
        raise UnsupportedCheckpointError(
            f"{config.path}: rope type {kind!r} together with 'partial_rotary_factor' cannot be kept."
        )
    neox = config.flag("rope_is_neox_style") is not False
    if not neox and dimensions != head_dim:
        raise UnsupportedCheckpointError(
            f"{config.path}: 'rope_is_neox_style' false together with 'partial_rotary_factor' cannot be kept."
        )
    return Rope(theta, dimensions, scaling, factors, neox)


def _rope_fields(config: Fields) -> Fields:
    """Rope parameters first, then the top level, where older configs keep rope_theta."""
    parameters, scaling = config.section("rope_parameters"), config.section("rope_scaling")
    if parameters and scaling and parameters != scaling:
        raise config.wrong("rope_scaling", "differs from 'rope_parameters'; remove the one that is wrong")
    section = parameters or scaling
    by_kind = [section[kind] for kind in _LAYER_KINDS if kind in section]
    if by_kind:
        if any(entry != by_kind[0] for entry in by_kind) or not isinstance(by_kind[0], dict):
            raise UnsupportedCheckpointError(
                f"{config.path}: 'rope_parameters' differ between full and sliding layers; llama.cpp has one rope."
            )
        section = by_kind[0]
    return Fields(config.path, (section, *config.scopes))


def _rotated_dimensions(fields: Fields, head_dim: int) -> int:
    factor = fields.optional_number("partial_rotary_factor")
    dimensions = head_dim if factor is None else int(head_dim * factor)
    if not 0 < dimensions <= head_dim or dimensions % 2:
        raise fields.wrong("partial_rotary_factor", f"rotates {dimensions} of {head_dim} dimensions")
    return dimensions


_Scaling = tuple[RopeScaling | None, tuple[float, ...]]


def _unscaled(_fields: Fields, _theta: float, _dimensions: int) -> _Scaling:
    return None, ()


def _linear(fields: Fields, _theta: float, _dimensions: int) -> _Scaling:
    return RopeScaling("linear", fields.number("factor")), ()


def _original_context(fields: Fields) -> int:
    """As transformers: its own key, else the context length of the config."""
    return fields.optional_integer("original_max_position_embeddings") or fields.integer("max_position_embeddings")


def _yarn(fields: Fields, _theta: float, _dimensions: int) -> _Scaling:
    for key, fixed in _FIXED_YARN.items():
        value = fields.get(key)
        if value is not None and value != fixed:
            raise UnsupportedCheckpointError(
                f"{fields.path}: yarn's {key!r} is {value!r}, but llama.cpp's dflash graph always uses {fixed!r}."
            )
    original = _original_context(fields)
    factor = fields.optional_number("factor") or fields.integer("max_position_embeddings") / original
    wanted = fields.optional_number("attention_factor") or fields.optional_number("attn_factor")
    if wanted is None:
        mscale, all_dims = fields.optional_number("mscale"), fields.optional_number("mscale_all_dim")
        wanted = _mscale(factor, mscale) / _mscale(factor, all_dims) if mscale and all_dims else _mscale(factor, 1.0)
    # llama.cpp multiplies by 0.1 ln(factor) + 1 itself.
    relative = wanted / _mscale(factor, 1.0)
    if math.isclose(relative, 1.0, rel_tol=1e-6):
        relative = 1.0
    return RopeScaling("yarn", factor, original, relative), ()


def _mscale(factor: float, weight: float) -> float:
    """YaRN's attention factor (paper section 3.4; transformers get_mscale)."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _llama3(fields: Fields, theta: float, dimensions: int) -> _Scaling:
    """Frequency factors of Llama 3.1: long wavelengths slowed by `factor`, short ones kept, blended between."""
    factor = fields.number("factor")
    low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
    if low >= high:
        raise fields.wrong("low_freq_factor", f"is {low}, not below 'high_freq_factor' {high}")
    context = fields.integer("original_max_position_embeddings")
    wavelengths = 2 * np.pi * theta ** (np.arange(0, dimensions, 2, dtype=np.float64) / dimensions)
    blend = np.clip((context / wavelengths - low) / (high - low), 0.0, 1.0)
    factors = 1.0 / ((1.0 - blend) / factor + blend)
    return None, tuple(factors.tolist())


_SCALINGS: dict[str, Callable[[Fields, float, int], _Scaling]] = {
    "default": _unscaled,
    "none": _unscaled,
    "linear": _linear,
    "yarn": _yarn,
    "llama3": _llama3,
}
