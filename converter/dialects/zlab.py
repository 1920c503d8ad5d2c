"""Reader of the z-lab dialect: DFlashDraftModel (v1) and DFlash2DraftModel, a Qwen3 config with a dflash_config.

Drafters of gpt-oss, Nemotron and MiMo speak it too, each with something more: biases, no block size, sinks.
"""

from __future__ import annotations

from dflash2.converter.config import DrafterConfig
from dflash2.converter.dialects.attention import read_attention
from dflash2.converter.dialects.backbone import Layout, read_backbone, read_taps
from dflash2.converter.dialects.contradictions import refuse_draft_vocabulary, refuse_levels
from dflash2.converter.dialects.fields import Fields
from dflash2.converter.dialects.overrides import Overrides

_PREFIX = "model."
_BARE = ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook")
# Names that an export may give without `.weight`.
_BARE_SUFFIX = ".attention_sink_bias.weight"


def zlab_name(name: str) -> str:
    """A tensor's canonical name: no `model.` prefix, codebooks with `.weight`, which exports name either way."""
    name = name.removeprefix(_PREFIX)
    if name.endswith(_BARE_SUFFIX):
        return name.removesuffix(".weight")
    return f"{name}.weight" if name in _BARE else name


def zlab_layout(top: Fields) -> Layout:
    """A Qwen3 config whose `dflash_config` goes before its top level; raises CheckpointError where they contradict."""
    refuse_levels(top)
    drafter = Fields(top.path, (top.section("dflash_config"), *top.scopes))
    refuse_draft_vocabulary(drafter, top.integer("vocab_size"))
    return Layout(top, drafter)


def read_zlab(top: Fields, architecture: str, overrides: Overrides) -> DrafterConfig:
    """Normalise a z-lab config; raises CheckpointError naming the key that is missing, wrong or unsupported."""
    layout = zlab_layout(top)
    attention, notes = read_attention(top, layout.drafter, layout.layers, overrides.sliding_window)
    taps = read_taps(layout.drafter, "target_layer_ids", overrides, "outputs")
    return read_backbone(layout, architecture, overrides, taps=taps, attention=attention, notes=notes)
