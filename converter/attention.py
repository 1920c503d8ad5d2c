"""Sliding windows and causality of a drafter's layers, as the reference computes them."""

from __future__ import annotations

from dflash2.converter.config import Attention
from dflash2.converter.fields import Fields
from dflash2.errors import UnsupportedCheckpointError

_KINDS = {"full_attention": False, "sliding_attention": True}
# transformers' Qwen3Config: layers from this index on slide when `layer_types` is absent.
_DEFAULT_MAX_WINDOW_LAYERS = 28


def read_attention(config: Fields, drafter: Fields, layers: int) -> tuple[Attention, tuple[str, ...]]:
    """The attention rule, and a sentence for each decision a user should know of.

    `config` is the top level, `drafter` the dflash_config with the top level behind it.
    Raises CheckpointError for contradictions, UnsupportedCheckpointError for other kinds of layers.
    """
    notes: list[str] = []
    if drafter.flag("use_swa"):
        sliding = (True,) * layers
        window = drafter.optional_integer("swa_window_size") or config.optional_integer("sliding_window")
    else:
        sliding = _sliding_layers(config, layers)
        window = config.optional_integer("sliding_window")
        if any(sliding) and config.flag("use_sliding_window") is False:
            window = None
            notes.append("'use_sliding_window' is false: sliding layers get no window and keep their causality.")
        elif any(sliding) and window is None:
            raise config.missing("sliding_window")
        elif any(sliding) and config.flag("use_sliding_window") is None:
            notes.append(f"'use_sliding_window' is absent: the window of {window} tokens is kept.")
    one_rule = config.flag("is_causal")
    if one_rule is None:
        one_rule = drafter.flag("causal")
    attention = Attention(
        sliding=sliding,
        window=window if any(sliding) else None,
        causal_full=bool(one_rule),
        causal_sliding=True if one_rule is None else one_rule,
    )
    return attention, tuple(notes)


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
        if not isinstance(kind, str) or kind not in _KINDS:
            raise UnsupportedCheckpointError(
                f"{config.path}: 'layer_types' names {kind!r}; a drafter has full_attention and sliding_attention."
            )
    return tuple(_KINDS[kind] for kind in kinds)
