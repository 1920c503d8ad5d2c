"""Rotary embedding of a Hugging Face config, kept exactly as llama.cpp's dflash graph can compute it, or refused.

What that graph reads (pinned source, src/models/dflash.cpp and llama-context.cpp): freq_base, dimension_count,
scaling type/factor/original_context_length/attn_factor and the tensor rope_freqs. YaRN's beta_fast and beta_slow
keys are never read (32 and 1 are used), and M-RoPE ignores rope_freqs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dflash2.converter.config import Rope, RopeScaling
from dflash2.converter.dialects.fields import Fields, JsonObject
from dflash2.errors import UnsupportedCheckpointError

_LAYER_KINDS = ("full_attention", "sliding_attention")
# Values that llama.cpp uses whatever the file says; anything else would be lost in silence.
_FIXED_YARN = {"beta_fast": 32.0, "beta_slow": 1.0, "extrapolation_factor": 1.0, "truncate": True}


@dataclass(frozen=True)
class _Inputs:
    """A config's rope section, and the section with the top level behind it, where older configs keep some keys."""

    section: Fields
    both: Fields
    theta: float
    dimensions: int


_Scaling = tuple[RopeScaling | None, tuple[float, ...]]


def read_rope(config: Fields, head_dim: int, *, whole_head: bool = False, theta: float | None = None) -> Rope:
    """Rope of a config; raises UnsupportedCheckpointError for a type or parameter that cannot be kept.

    `whole_head` is the rule of transformers' Qwen3: without scaling, `partial_rotary_factor` is not looked at.
    `theta` goes before the config's base.
    """
    section = _rope_section(config)
    both = Fields(config.path, (*section.scopes, *config.scopes))
    kind = _rope_type(section)
    if theta is None:
        _refuse_two(section, config, "rope_theta", "; remove the one that is wrong, or give it with --rope-theta")
    if whole_head and kind == "default":
        dimensions = head_dim
    else:
        _refuse_two(section, config, "partial_rotary_factor")
        dimensions = _rotated_dimensions(both, head_dim)
    inputs = _Inputs(section, both, theta or both.number("rope_theta"), dimensions)
    reader = _SCALINGS.get(kind)
    if reader is None:
        raise UnsupportedCheckpointError(
            f"{config.path}: rope type {kind!r} cannot be kept; supported are {', '.join(sorted(_SCALINGS))}."
        )
    scaling, factors = reader(inputs)
    neox = config.flag("rope_is_neox_style") is not False
    if (factors or not neox) and inputs.dimensions != head_dim:
        other = f"rope type {kind!r}" if factors else "'rope_is_neox_style' false"
        raise UnsupportedCheckpointError(
            f"{config.path}: {other} together with 'partial_rotary_factor' cannot be kept in a drafter GGUF."
        )
    return Rope(inputs.theta, inputs.dimensions, scaling, factors, neox)


def _rope_type(section: Fields) -> str:
    new, old = section.text("rope_type"), section.text("type")
    if new and old and new != old:
        raise section.wrong("rope_type", f"is {new!r} and 'type' {old!r}; remove the one that is wrong")
    return new or old or "default"


def _refuse_two(section: Fields, config: Fields, key: str, way: str = "; remove the one that is wrong") -> None:
    """Raise CheckpointError if rope section and top level say `key` differently."""
    inner, outer = section.get(key), config.get(key)
    if inner is not None and outer is not None and inner != outer:
        raise section.wrong(key, f"is {inner} and {config.prefix + key!r} {outer}{way}")


def refuse_flat_beside_kinds(config: Fields, name: str, section: JsonObject) -> None:
    """Raise CheckpointError for keys of one rope beside those of one rope per kind of layer."""
    flat = [key for key, value in section.items() if key not in _LAYER_KINDS and value is not None]
    if flat:
        raise config.wrong(name, f"has {flat[0]!r} beside a rope per kind of layer; remove what is wrong")


def _rope_section(config: Fields) -> Fields:
    parameters, scaling = config.section("rope_parameters"), config.section("rope_scaling")
    if parameters and scaling and parameters != scaling:
        raise config.wrong("rope_scaling", "differs from 'rope_parameters'; remove the one that is wrong")
    name = "rope_parameters" if parameters else "rope_scaling"
    section = parameters or scaling
    by_kind = [section[kind] for kind in _LAYER_KINDS if kind in section]
    if by_kind:
        if any(entry != by_kind[0] for entry in by_kind) or not isinstance(by_kind[0], dict):
            raise UnsupportedCheckpointError(
                f"{config.path}: {name!r} differ between full and sliding layers; llama.cpp's drafters have one rope."
            )
        refuse_flat_beside_kinds(config, name, section)
        section = by_kind[0]
    return Fields(config.path, (section,), prefix=f"{name}.")


def _rotated_dimensions(fields: Fields, head_dim: int) -> int:
    factor = fields.optional_number("partial_rotary_factor")
    dimensions = head_dim if factor is None else int(head_dim * factor)
    if not 0 < dimensions <= head_dim or dimensions % 2:
        raise fields.wrong("partial_rotary_factor", f"rotates {dimensions} of {head_dim} dimensions")
    return dimensions


def _unscaled(_inputs: _Inputs) -> _Scaling:
    return None, ()


def _linear(inputs: _Inputs) -> _Scaling:
    return RopeScaling("linear", inputs.section.number("factor")), ()


def _yarn(inputs: _Inputs) -> _Scaling:
    section = inputs.section
    for key, fixed in _FIXED_YARN.items():
        value = section.get(key)
        if value is not None and value != fixed:
            raise UnsupportedCheckpointError(
                f"{section.path}: yarn's {key!r} is {value!r}, but llama.cpp's dflash graph always uses {fixed!r}."
            )
    # As transformers: the trained context is its own key, else the context length of the config.
    trained = inputs.both.optional_integer("original_max_position_embeddings")
    trained = trained or inputs.both.integer("max_position_embeddings")
    factor = section.number("factor")
    # llama.cpp multiplies by 0.1 ln(factor) + 1 itself.
    relative = _attention_factor(section, factor) / _mscale(factor, 1.0)
    if math.isclose(relative, 1.0, rel_tol=1e-6):
        relative = 1.0
    return RopeScaling("yarn", factor, trained, relative), ()


def _attention_factor(section: Fields, factor: float) -> float:
    """Factor on cos and sin: given, or from mscale and mscale_all_dim, or YaRN's own (as transformers)."""
    for key in ("attention_factor", "attn_factor"):
        if section.get(key) is not None:
            return section.number(key)
    mscale, all_dims = section.optional_number("mscale"), section.optional_number("mscale_all_dim")
    if mscale and all_dims and min(mscale, all_dims) > 0:
        return _mscale(factor, mscale) / _mscale(factor, all_dims)
    return _mscale(factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    """YaRN's attention factor, paper section 3.4."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _llama3(inputs: _Inputs) -> _Scaling:
    """Frequency factors of Llama 3.1: long wavelengths slowed by `factor`, short ones kept, blended between."""
    section = inputs.section
    factor = section.number("factor")
    low, high = section.number("low_freq_factor"), section.number("high_freq_factor")
    if low >= high:
        raise section.wrong("low_freq_factor", f"is {low}, not below 'high_freq_factor' {high}")
    trained = inputs.both.integer("original_max_position_embeddings")
    exponents = np.arange(0, inputs.dimensions, 2, dtype=np.float64) / inputs.dimensions
    wavelengths = 2 * np.pi * inputs.theta**exponents
    blend = np.clip((trained / wavelengths - low) / (high - low), 0.0, 1.0)
    factors = 1.0 / ((1.0 - blend) / factor + blend)
    return None, tuple(factors.tolist())


_SCALINGS: dict[str, Callable[[_Inputs], _Scaling]] = {
    "default": _unscaled,
    "none": _unscaled,
    "linear": _linear,
    "yarn": _yarn,
    "llama3": _llama3,
}
