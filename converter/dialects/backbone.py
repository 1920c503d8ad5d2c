"""What all layouts have in common: a Qwen3-shaped stack with taps, mask token and block, and DFlash 2's parts."""

from __future__ import annotations

from dataclasses import dataclass

from dflash2.constants import MAX_BLOCK_SIZE, MIN_BLOCK_SIZE
from dflash2.converter.config import Attention, Convolution, DrafterConfig, Rope, Selector
from dflash2.converter.dialects.contradictions import refuse_foreign
from dflash2.converter.dialects.fields import Fields
from dflash2.converter.dialects.overrides import Overrides
from dflash2.converter.dialects.rope import read_rope
from dflash2.converter.graph_size import largest_kernel
from dflash2.errors import UnsupportedCheckpointError

_MAX_LAYERS = 512  # LLAMA_MAX_LAYERS
_MAX_HEAD_DIM = 65536
_DFLASH2_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
# What transformers computes under each name, as llama.cpp's dflash graph spells it (None: what it does unasked).
_ACTIVATIONS = {"silu": None, "swish": None, "gelu_pytorch_tanh": "gelu_pytorch_tanh", "gelu_new": "gelu_pytorch_tanh"}


@dataclass(frozen=True)
class Layout:
    """Where a dialect keeps things: `top` has the transformer's keys, `drafter` those of the drafter.

    `whole_head_rope`: its training code rotates whole heads whatever `partial_rotary_factor` says.
    """

    top: Fields
    drafter: Fields
    whole_head_rope: bool = False

    @property
    def layers(self) -> int:
        """Number of layers."""
        return self.top.integer("num_hidden_layers", maximum=_MAX_LAYERS)


def read_backbone(
    layout: Layout,
    architecture: str,
    overrides: Overrides,
    *,
    taps: tuple[int, ...],
    attention: Attention,
    notes: tuple[str, ...] = (),
) -> DrafterConfig:
    """The config of a layout whose `taps` (ids of layer outputs) and `attention` its dialect has read.

    Raises CheckpointError naming the key that is missing or wrong, UnsupportedCheckpointError for what a drafter GGUF
    cannot express.
    """
    top, drafter = layout.top, layout.drafter
    hidden_size, head_dim = top.integer("hidden_size"), _head_dim(top)
    refuse_foreign((*drafter.scopes, *top.scopes), top, head_dim)
    heads, kv_heads = top.integer("num_attention_heads"), top.integer("num_key_value_heads")
    if heads % kv_heads:
        raise top.wrong("num_key_value_heads", f"is {kv_heads}, which does not divide {heads} attention heads")
    softcap = drafter.optional_number("final_logit_softcapping")
    convolution, selector = _dflash2_parts(drafter, architecture, hidden_size, layout.layers)
    return DrafterConfig(
        architecture=architecture,
        layers=layout.layers,
        hidden_size=hidden_size,
        feed_forward_size=top.integer("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        context_length=top.integer("max_position_embeddings"),
        vocab_size=top.integer("vocab_size"),
        rms_epsilon=top.number("rms_norm_eps"),
        block_size=_block_size(drafter, overrides),
        mask_token_id=_mask_token(drafter, overrides),
        taps=taps,
        attention=attention,
        rope=_rope(layout, head_dim, overrides),
        convolution=convolution,
        selector=selector,
        logit_scale=_factor(drafter, "output_multiplier"),
        logit_softcap=softcap if softcap and softcap > 0 else None,
        # On the bare rows of the table, as in the reference: a target's own factor (Gemma's root of the hidden size)
        # is part of its embedding module and of its graph, not of the table that drafters look up.
        embedding_scale=_factor(drafter, "input_embedding_scale"),
        attention_value_scale=_factor(drafter, "attention_value_scale"),
        activation=_activation(top),
        attention_bias=bool(top.flag("attention_bias")),
        attention_sinks=bool(drafter.flag("attention_sink_bias")),
        own_embeddings=top.flag("has_embed_tokens") is not False,
        own_head=top.flag("has_lm_head") is not False,
        tied_embeddings=bool(top.flag("tie_word_embeddings")),
        target_layers=top.optional_integer("num_target_layers"),
        name_or_path=top.text("_name_or_path"),
        notes=notes,
    )


def read_taps(drafter: Fields, key: str, overrides: Overrides, named_by: str | None) -> tuple[int, ...]:
    """Tap ids as outputs of layers; `named_by` is the dialect's convention, None where it has more than one.

    Order and repetition stay as given: the reference and llama.cpp concatenate the features in that order.
    Raises CheckpointError if the convention is open and the user has not settled it.
    """
    ids = drafter.integers(key)
    convention = overrides.tap_ids or named_by
    if convention is None:
        raise drafter.wrong(
            key, "may name layers by their output or by their input; say which with --tap-ids outputs|inputs"
        )
    return ids if convention == "outputs" else tuple(layer - 1 for layer in ids)


def _head_dim(top: Fields) -> int:
    head_dim = top.integer("head_dim", maximum=_MAX_HEAD_DIM)
    if head_dim % 2:
        raise top.wrong("head_dim", f"is {head_dim}, which is odd")
    values = top.optional_integer("v_head_dim")
    if values not in (None, head_dim):
        raise UnsupportedCheckpointError(
            f"{top.path}: 'v_head_dim' is {values} and 'head_dim' {head_dim}; llama.cpp's dflash graph has one size."
        )
    return head_dim


def _rope(layout: Layout, head_dim: int, overrides: Overrides) -> Rope:
    rope = read_rope(layout.top, head_dim, whole_head=layout.whole_head_rope, theta=overrides.rope_theta)
    # MiMo-V2.5: its own code, upstream's converter and other runtimes take one, the other, or each for a part.
    backbone = layout.drafter.optional_number("backbone_rotary_base")
    if overrides.rope_theta is None and backbone not in (None, rope.theta):
        raise layout.drafter.wrong(
            "backbone_rotary_base",
            f"is {backbone:g} and 'rope_theta' {rope.theta:g}, and runtimes disagree which of them the drafter ropes"
            " with; say which with --rope-theta, and keep the one that drafts better",
        )
    return rope


def _block_size(drafter: Fields, overrides: Overrides) -> int:
    if overrides.block_size is not None:
        return overrides.block_size
    flag = "--block-size"
    return drafter.agreed("block_size", flag).integer("block_size", MIN_BLOCK_SIZE, MAX_BLOCK_SIZE, flag)


def _mask_token(drafter: Fields, overrides: Overrides) -> int:
    if overrides.mask_token_id is not None:
        return overrides.mask_token_id
    flag = "--mask-token-id"
    return drafter.agreed("mask_token_id", flag).integer("mask_token_id", minimum=0, flag=flag)


def _factor(drafter: Fields, key: str) -> float | None:
    """A scale; llama.cpp takes 0 for an absent one, and a negative one would turn the order of logits around."""
    return None if drafter.get(key) is None else drafter.number(key)


def _activation(top: Fields) -> str | None:
    name = top.text("hidden_act") or "silu"
    if name not in _ACTIVATIONS:
        reason = ", and llama.cpp's is the tanh approximation" if name == "gelu" else ""
        raise UnsupportedCheckpointError(
            f"{top.path}: 'hidden_act' is {name!r}{reason}; a drafter can have {', '.join(_ACTIVATIONS)}."
        )
    return _ACTIVATIONS[name]


def _dflash2_parts(
    drafter: Fields, architecture: str, hidden_size: int, layers: int
) -> tuple[Convolution | None, Selector | None]:
    """Convolution and selector come together or not at all (the loader's rule)."""
    is_dflash2 = "DFlash2" in architecture or any(drafter.get(key) is not None for key in _DFLASH2_KEYS)
    if not is_dflash2:
        return None, None
    convolution = Convolution(drafter.integer("conv_kernel_size"), drafter.integer("conv_group_size"))
    selector = Selector(drafter.integer("selector_rank"), drafter.integer("selector_top_k"))
    if hidden_size % convolution.group:
        raise drafter.wrong(
            "conv_group_size", f"is {convolution.group}, which does not divide 'hidden_size' {hidden_size}"
        )
    longest = largest_kernel(layers)
    if convolution.taps > longest:
        raise UnsupportedCheckpointError(
            f"{drafter.path}: 'conv_kernel_size' is {convolution.taps}, but llama.cpp's graph of {layers} layers holds"
            f" {longest} at most and ends the process beyond that; train with a shorter kernel."
        )
    lattice = selector.top_k * (selector.top_k + 1)
    if hidden_size < lattice:
        raise UnsupportedCheckpointError(
            f"{drafter.path}: 'selector_top_k' {selector.top_k} needs a 'hidden_size' of at least {lattice}"
            f" in llama.cpp, and it is {hidden_size}."
        )
    return convolution, selector
