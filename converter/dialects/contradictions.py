"""What a config says twice, in the wrong place, or of a computation that llama.cpp's dflash graph does not have.

Each is refused by name: whichever value were taken, the drafter would convert and draft badly in silence.
"""

from __future__ import annotations

import math

from dflash2.converter.dialects.fields import Fields, JsonObject
from dflash2.errors import UnsupportedCheckpointError

_SECTION = "dflash_config"
# Read from `dflash_config` first, then from the top level. (block_size and mask_token_id have options, and say so.)
_EITHER = (
    "target_layer_ids", "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k", "output_multiplier",
    "final_logit_softcapping", "input_embedding_scale", "attention_value_scale", "attention_sink_bias", "causal",
    "use_swa", "swa_window_size", "backbone_rotary_base", "projector_type", "draft_vocab_size",
)  # fmt: skip
# Read from the top level alone.
_TOP = (
    "layer_types", "sliding_window", "use_sliding_window", "max_window_layers", "is_causal", "rope_theta",
    "rope_parameters", "rope_scaling", "partial_rotary_factor", "rope_is_neox_style", "attention_bias", "hidden_act",
    "v_head_dim", "has_embed_tokens", "has_lm_head", "tie_word_embeddings",
)  # fmt: skip
# Of other model families, and the values that change nothing beside null.
_FOREIGN: dict[str, tuple[object, ...]] = {
    "attn_logit_softcapping": (0,),
    "attn_output_gate": (False,),
    "clip_qkv": (),
    "embedding_multiplier": (1,),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "mlp_bias": (False,),
    "residual_multiplier": (1,),
    "use_qk_norm": (True,),
}


def refuse_levels(top: Fields) -> None:
    """Raise CheckpointError for a key that `dflash_config` and the top level say differently, or that is misplaced."""
    section = top.section(_SECTION)
    for key in (*_EITHER, *_TOP):
        inner, outer = section.get(key), top.get(key)
        if inner is None or inner == outer:
            continue
        if outer is not None:
            raise top.wrong(
                key, f"is another value in {_SECTION!r} than at the top level; remove the one that is wrong"
            )
        if key in _TOP:
            raise top.wrong(f"{_SECTION}.{key}", "is not looked at there; move it to the top level")


def refuse_foreign(scopes: tuple[JsonObject, ...], fields: Fields, head_dim: int) -> None:
    """Raise UnsupportedCheckpointError for a key that changes what is computed, unless its value is a neutral one."""
    usual = {"query_pre_attn_scalar": float(head_dim), "attention_multiplier": head_dim**-0.5}
    for scope in scopes:
        for key, neutral in _FOREIGN.items():
            value = scope.get(key)
            if value is not None and value not in neutral:
                raise _foreign(fields, key, value)
        for key, scale in usual.items():
            value = scope.get(key)
            if value is not None and not (isinstance(value, (int, float)) and math.isclose(value, scale, rel_tol=1e-6)):
                raise _foreign(fields, key, value)


def refuse_draft_vocabulary(drafter: Fields, vocab_size: int) -> None:
    """Raise UnsupportedCheckpointError for a reduced vocabulary in a layout that has no map of it."""
    rows = drafter.optional_integer("draft_vocab_size")
    if rows not in (None, vocab_size):
        raise UnsupportedCheckpointError(
            f"{drafter.path}: 'draft_vocab_size' is {rows} and 'vocab_size' {vocab_size}; only speculators' layout has"
            " a map of a reduced vocabulary, export with the whole one."
        )


def _foreign(fields: Fields, key: str, value: object) -> UnsupportedCheckpointError:
    return UnsupportedCheckpointError(
        f"{fields.path}: {key!r} is {value!r}, which llama.cpp's dflash graph does not compute; remove the key if the"
        " drafter was trained without it."
    )
