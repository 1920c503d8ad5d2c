"""Sliding windows and causality of a drafter's layers, as the reference computes them."""

from __future__ import annotations

from dflash2.converter.config import Attention
from dflash2.converter.dialects.fields import Fields
from dflash2.errors import UnsupportedCheckpointError

_SLIDES = {"full_attention": False, "sliding_attention": True}
# transformers' Qwen3Config: layers from this index on slide when `layer_types` is absent.
_DEFAULT_MAX_WINDOW_LAYERS = 28
_DROPPED = "{reason}: sliding layers get no window and keep their causality."


def read_attention(
    config: Fields, drafter: Fields, layers: int, sliding_window: bool | None
) -> tuple[Attention, tuple[str, ...]]:
    """The attention rule, and a sentence for each decision a user should know of.

    `config` is the top level, `drafter` the dflash_config with the top level behind it; `sliding_window` keeps or
    drops the window against `use_sliding_window`.
    Raises CheckpointError for contradictions, UnsupportedCheckpointError for what a drafter GGUF cannot say.
    """
    named = _sliding_layers(config, layers)
    one_rule = config.flag("is_causal")
    other = drafter.flag("causal")
    said: tuple[str, ...] = ()
    if one_rule is None:
        one_rule = other
    elif other not in (None, one_rule):
        said = (f"'is_causal' {one_rule} goes before 'causal' {other}, as in the reference.",)
    if drafter.flag("use_swa"):
        attention, notes = _every_layer_slides(config, drafter, named, one_rule, sliding_window)
        return attention, (*said, *notes)
    if drafter.get("use_swa") is None and drafter.get("swa_window_size") is not None:
        said = (*said, "'swa_window_size' is not used: 'use_swa' is absent.")
    window, notes = _window(config, sliding_window) if any(named) else (None, ())
    attention = Attention(
        sliding=named,
        window=window,
        causal_full=bool(one_rule),
        causal_sliding=True if one_rule is None else one_rule,
    )
    return attention, (*said, *notes)


def read_layers(
    config: Fields, layers: int, sliding_window: bool | None, causal: bool
) -> tuple[Attention, tuple[str, ...]]:
    """Like `read_attention` for a dialect that states one causality for all its layers."""
    named = _sliding_layers(config, layers)
    window, notes = _window(config, sliding_window) if any(named) else (None, ())
    return Attention(named, window, causal_full=causal, causal_sliding=causal), notes


def _every_layer_slides(
    config: Fields, drafter: Fields, named: tuple[bool, ...], one_rule: bool | None, chosen: bool | None
) -> tuple[Attention, tuple[str, ...]]:
    """`use_swa` puts a window on every layer; causality still follows the kind that `layer_types` names."""
    window = drafter.optional_integer("swa_window_size") or config.optional_integer("sliding_window")
    if window is None:
        raise drafter.missing("swa_window_size")
    if one_rule is None and len(set(named)) > 1:
        raise UnsupportedCheckpointError(
            f"{config.path}: 'use_swa' with mixed 'layer_types' needs 'is_causal', or layers of one cache would differ."
        )
    causal = named[0] if one_rule is None else one_rule
    notes = (_DROPPED.format(reason="By your choice"),) if chosen is False else ()
    return Attention((True,) * len(named), None if notes else window, causal, causal), notes


def _window(config: Fields, chosen: bool | None) -> tuple[int | None, tuple[str, ...]]:
    """The window of sliding layers; absent `use_sliding_window` keeps it, false drops it, unless the user chose."""
    wanted = config.flag("use_sliding_window")
    if chosen is False or (chosen is None and wanted is False):
        reason = "By your choice" if chosen is False else "'use_sliding_window' is false"
        return None, (_DROPPED.format(reason=reason),)
    window = config.integer("sliding_window")
    if chosen or wanted is None:
        reason = "By your choice" if chosen else "'use_sliding_window' is absent"
        return window, (f"{reason}: the window of {window} tokens is kept.",)
    return window, ()


def _sliding_layers(config: Fields, layers: int) -> tuple[bool, ...]:
    kinds = config.get("layer_types")
    if kinds is None:
        first = config.optional_integer("max_window_layers", minimum=0)
        first = _DEFAULT_MAX_WINDOW_LAYERS if first is None else first
        slides = bool(config.flag("use_sliding_window")) and config.get("sliding_window") is not None
        return tuple(slides and layer >= first for layer in range(layers))
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise config.wrong("layer_types", f"is not a list of {layers} names, one per layer")
    for kind in kinds:
        if not isinstance(kind, str) or kind not in _SLIDES:
            raise UnsupportedCheckpointError(
                f"{config.path}: 'layer_types' names {kind!r}; a drafter has full_attention and sliding_attention."
            )
    return tuple(_SLIDES[kind] for kind in kinds)
