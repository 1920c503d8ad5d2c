"""Reader of vLLM's speculators format (speculators 0.9.0): flat drafter keys beside a `transformer_layer_config`.

Facts taken from that package: a tap id i is `hidden_states[i]`, the *input* of layer i (its own converter writes
z-lab's id + 1); full layers are bidirectional, sliding ones follow `sliding_window_non_causal`; heads are rotated
whole; an own head exists only with a reduced vocabulary, otherwise it is a frozen copy of the target's. The window of
its training mask counts from the block's anchor, that of its server and of llama.cpp from each row: the oldest keys of
a window, no more than `block_size`, are seen by one and not by the other.
"""

from __future__ import annotations

from dataclasses import replace

from dflash2.converter.config import Attention, DrafterConfig
from dflash2.converter.dialects.attention import read_layers
from dflash2.converter.dialects.backbone import Layout, read_backbone, read_taps
from dflash2.converter.dialects.fields import Fields
from dflash2.converter.dialects.overrides import Overrides
from dflash2.converter.dialects.rope import refuse_flat_beside_kinds
from dflash2.converter.dialects.vocabulary import MEMBERS, OFFSETS
from dflash2.errors import UnsupportedCheckpointError

_TAPS = "aux_hidden_state_layer_ids"
# The target's own head and final norm, which training compares with, and the maps of a vocabulary: read if reduced.
_UNUSED = ("verifier_lm_head.weight", "verifier_norm.weight", OFFSETS, MEMBERS)


def read_speculators(top: Fields, architecture: str, overrides: Overrides) -> DrafterConfig:
    """Normalise a speculators config; raises CheckpointError naming the key that is missing, wrong or unsupported."""
    layers = _layers(top)
    layout = Layout(layers, top, whole_head_rope=True)
    _refuse_what_runtimes_lack(top, layers)
    attention, notes = _attention(top, layers, layout.layers, overrides)
    config = read_backbone(
        layout,
        architecture,
        overrides,
        taps=read_taps(top, _TAPS, overrides, _tap_convention(top)),
        attention=attention,
        notes=notes,
    )
    rows = _draft_vocabulary(top, config)
    return replace(config, draft_vocab_size=rows, draft_vocab_map=overrides.d2t, unused_tensors=_UNUSED)


def _layers(top: Fields) -> Fields:
    """The transformer's own config; of a rope per kind of layer the package takes the sliding layers'."""
    name = "transformer_layer_config"
    layers = Fields(top.path, (top.section(name),), prefix=f"{name}.")
    rope = layers.section("rope_parameters")
    if "sliding_attention" not in rope:
        return layers
    refuse_flat_beside_kinds(layers, "rope_parameters", rope)
    return replace(layers, scopes=({"rope_parameters": rope["sliding_attention"]}, *layers.scopes))


def _attention(top: Fields, layers: Fields, n_layers: int, overrides: Overrides) -> tuple[Attention, tuple[str, ...]]:
    """A sliding layer without a window is a full one, for the package's masks too."""
    non_causal = top.flag("sliding_window_non_causal")
    if non_causal is None:
        non_causal = top.text("speculators_model_type") == "dflash2"
    chosen = overrides.sliding_window
    # Qwen3Config forgets the window unless this is true.
    trained = bool(layers.flag("use_sliding_window"))
    attention, notes = read_layers(layers, n_layers, trained if chosen is None else chosen, causal=not non_causal)
    if not trained and not chosen:
        notes = ("'use_sliding_window' is not true: every layer is a full one.",) if any(attention.sliding) else ()
        return Attention((False,) * n_layers, None, causal_full=False, causal_sliding=False), notes
    return replace(attention, causal_full=False), notes if chosen is not None else ()


def _tap_convention(top: Fields) -> str | None:
    """Inputs, if the package wrote the file or the ids for its server repeat them; otherwise open."""
    served = top.get("eagle_aux_hidden_state_layer_ids")
    if served is not None:
        ids = top.integers(_TAPS)
        for convention, expected in (("inputs", ids), ("outputs", tuple(layer + 1 for layer in ids))):
            if served == list(expected):
                return convention
        return None
    return "inputs" if top.text("speculators_version") else None


def _draft_vocabulary(top: Fields, config: DrafterConfig) -> int | None:
    rows = top.optional_integer("draft_vocab_size")
    if rows is None or rows == config.vocab_size:
        return None
    if rows > config.vocab_size:
        raise top.wrong("draft_vocab_size", f"is {rows}, more than the {config.vocab_size} tokens of 'vocab_size'")
    if config.selector:
        raise UnsupportedCheckpointError(
            f"{top.path}: 'draft_vocab_size' is {rows}, but a DFlash 2 selector ranks the whole vocabulary of"
            f" {config.vocab_size} tokens; speculators itself refuses this, export with the whole vocabulary."
        )
    return rows


def _refuse_what_runtimes_lack(top: Fields, layers: Fields) -> None:
    if top.flag("sample_from_anchor"):
        raise UnsupportedCheckpointError(
            f"{top.path}: 'sample_from_anchor' is true, but llama.cpp drafts behind the anchor only; train without it."
        )
    width, own = top.optional_integer("target_hidden_size"), layers.integer("hidden_size")
    if width not in (None, own):
        raise UnsupportedCheckpointError(
            f"{top.path}: 'target_hidden_size' is {width} and the drafter's 'hidden_size' {own}; llama.cpp needs one"
            " size for both."
        )
