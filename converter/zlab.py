"""Reader of the z-lab dialect: DFlashDraftModel (v1) and DFlash2DraftModel, a Qwen3 config with a dflash_config."""

from __future__ import annotations

from dflash2.converter.attention import read_attention
from dflash2.converter.config import Convolution, DrafterConfig, Selector
from dflash2.converter.fields import Fields
from dflash2.converter.overrides import Overrides
from dflash2.converter.rope import read_rope
from dflash2.errors import UnsupportedCheckpointError

_ACTIVATION = "silu"
_MAX_LAYERS = 512  # LLAMA_MAX_LAYERS
_MAX_HEAD_DIM = 65536
_PREFIX = "model."
_BARE = ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook")
_DFLASH2_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


def zlab_name(name: str) -> str:
    """A tensor's canonical name: no `model.` prefix, codebooks with `.weight`, which exports name either way."""
    name = name.removeprefix(_PREFIX)
    return f"{name}.weight" if name in _BARE else name


def read_zlab(top: Fields, architecture: str, overrides: Overrides) -> DrafterConfig:
    """Normalise a z-lab config; raises CheckpointError naming the key that is missing, wrong or unsupported."""
    drafter = Fields(top.path, (top.section("dflash_config"), *top.scopes))
    _refuse_what_the_graph_lacks(top)
    layers = top.integer("num_hidden_layers", maximum=_MAX_LAYERS)
    hidden_size, head_dim = top.integer("hidden_size"), top.integer("head_dim", maximum=_MAX_HEAD_DIM)
    if head_dim % 2:
        raise top.wrong("head_dim", f"is {head_dim}, which is odd")
    heads, kv_heads = top.integer("num_attention_heads"), top.integer("num_key_value_heads")
    if heads % kv_heads:
        raise top.wrong("num_key_value_heads", f"is {kv_heads}, which does not divide {heads} attention heads")
    attention, notes = read_attention(top, drafter, layers, overrides.sliding_window)
    softcap = drafter.optional_number("final_logit_softcapping")
    convolution, selector = _dflash2_parts(drafter, architecture, hidden_size)
    return DrafterConfig(
        architecture=architecture,
        layers=layers,
        hidden_size=hidden_size,
        feed_forward_size=top.integer("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        context_length=top.integer("max_position_embeddings"),
        vocab_size=top.integer("vocab_size"),
        rms_epsilon=top.number("rms_norm_eps"),
        block_size=overrides.block_size or drafter.integer("block_size", minimum=2, flag="--block-size"),
        mask_token_id=_mask_token(drafter, overrides),
        taps=drafter.integers("target_layer_ids"),
        attention=attention,
        rope=read_rope(top, head_dim),
        convolution=convolution,
        selector=selector,
        logit_scale=drafter.optional_number("output_multiplier"),
        logit_softcap=softcap if softcap and softcap > 0 else None,
        embedding_scale=drafter.optional_number("input_embedding_scale"),
        attention_value_scale=drafter.optional_number("attention_value_scale"),
        own_embeddings=top.flag("has_embed_tokens") is not False,
        tied_embeddings=bool(top.flag("tie_word_embeddings")),
        target_layers=top.optional_integer("num_target_layers"),
        name_or_path=top.text("_name_or_path"),
        notes=notes,
    )


def _mask_token(drafter: Fields, overrides: Overrides) -> int:
    if overrides.mask_token_id is not None:
        return overrides.mask_token_id
    return drafter.integer("mask_token_id", minimum=0, flag="--mask-token-id")


def _refuse_what_the_graph_lacks(top: Fields) -> None:
    if top.flag("attention_bias"):
        raise UnsupportedCheckpointError(
            f"{top.path}: 'attention_bias' is true, but llama.cpp's dflash loader has no bias tensors."
        )
    activation = top.text("hidden_act") or _ACTIVATION
    if activation != _ACTIVATION:
        raise UnsupportedCheckpointError(
            f"{top.path}: 'hidden_act' is {activation!r}; only {_ACTIVATION!r} drafters are converted."
        )


def _dflash2_parts(drafter: Fields, architecture: str, hidden_size: int) -> tuple[Convolution | None, Selector | None]:
    """Convolution and selector come together or not at all (the loader's rule)."""
    is_dflash2 = architecture == "DFlash2DraftModel" or any(drafter.get(key) is not None for key in _DFLASH2_KEYS)
    if not is_dflash2:
        return None, None
    convolution = Convolution(drafter.integer("conv_kernel_size"), drafter.integer("conv_group_size"))
    selector = Selector(drafter.integer("selector_rank"), drafter.integer("selector_top_k"))
    if hidden_size % convolution.group:
        raise drafter.wrong(
            "conv_group_size", f"is {convolution.group}, which does not divide 'hidden_size' {hidden_size}"
        )
    lattice = selector.top_k * (selector.top_k + 1)
    if hidden_size < lattice:
        raise UnsupportedCheckpointError(
            f"{drafter.path}: 'selector_top_k' {selector.top_k} needs a 'hidden_size' of at least {lattice}"
            f" in llama.cpp, and it is {hidden_size}."
        )
    return convolution, selector
