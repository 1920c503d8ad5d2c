"""Reader of NeMo AutoModel's exports (nemo-automodel 0.7.0): z-lab's keys, written by another trainer's rules.

What its code computes and z-lab's readers would not: layers are bidirectional whatever their kind; its JetSpec recipe
stamps `is_causal` false beside `dflash_config.causal` true and trains with the latter; heads are rotated whole even
where a `partial_rotary_factor` of the target has leaked into the config.
"""

from __future__ import annotations

from dataclasses import replace

from dflash2.converter.config import DrafterConfig
from dflash2.converter.dialects.attention import read_layers
from dflash2.converter.dialects.backbone import read_backbone, read_taps
from dflash2.converter.dialects.fields import Fields
from dflash2.converter.dialects.overrides import Overrides
from dflash2.converter.dialects.zlab import zlab_layout


def read_nemo(top: Fields, architecture: str, overrides: Overrides) -> DrafterConfig:
    """Normalise a NeMo config; raises CheckpointError naming the key that is missing, wrong or unsupported."""
    layout = replace(zlab_layout(top), whole_head_rope=True)
    causal = layout.drafter.flag("causal")
    if causal is None:
        causal = bool(top.flag("is_causal"))
    attention, notes = read_layers(top, layout.layers, overrides.sliding_window, causal)
    return read_backbone(
        layout,
        architecture,
        overrides,
        taps=read_taps(layout.drafter, "target_layer_ids", overrides, "outputs"),
        attention=attention,
        notes=(*notes, *_rope_note(top)),
    )


def _rope_note(top: Fields) -> tuple[str, ...]:
    scopes = (top, Fields(top.path, (top.section("rope_parameters"),)))
    if all(scope.get("partial_rotary_factor") in (None, 1.0) for scope in scopes):
        return ()
    return ("'partial_rotary_factor' is the target's: this trainer rotates whole heads, and so does the drafter.",)
