"""Reader of MuseGlimmerAssistantModel (transformers): v1 with a flat config and its own names for two tensors."""

from __future__ import annotations

from dataclasses import replace

from dflash2.converter.config import Attention, DrafterConfig
from dflash2.converter.dialects.attention import read_layers
from dflash2.converter.dialects.backbone import Layout, read_backbone, read_taps
from dflash2.converter.dialects.contradictions import refuse_draft_vocabulary
from dflash2.converter.dialects.fields import Fields
from dflash2.converter.dialects.overrides import Overrides
from dflash2.converter.dialects.zlab import zlab_name

_RENAMED = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}


def muse_name(name: str) -> str:
    """A tensor's z-lab name."""
    name = zlab_name(name)
    return _RENAMED.get(name, name)


def read_muse(top: Fields, architecture: str, overrides: Overrides) -> DrafterConfig:
    """Normalise a Muse Glimmer assistant's config; raises CheckpointError naming the key that is missing or wrong.

    Its layers are bidirectional, slide unless `layer_types` says otherwise, and always have their window: there is no
    `use_sliding_window`. That window is inclusive (distance <= sliding_window), one token more than llama.cpp's.
    """
    layout = Layout(top, top, whole_head_rope=True)
    refuse_draft_vocabulary(top, top.integer("vocab_size"))
    kinds = Fields(top.path, (*top.scopes, {"layer_types": ["sliding_attention"] * layout.layers}))
    always = overrides.sliding_window is not False
    attention, notes = read_layers(kinds, layout.layers, always, causal=False)
    return read_backbone(
        layout,
        architecture,
        overrides,
        taps=read_taps(top, "target_layer_ids", overrides, "outputs"),
        attention=_inclusive(attention),
        notes=notes if not always else (),
    )


def _inclusive(attention: Attention) -> Attention:
    return attention if attention.window is None else replace(attention, window=attention.window + 1)
