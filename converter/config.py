"""The drafter as every other module sees it: one frozen record, whatever dialect its config.json speaks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Convolution:
    """Grouped dynamic causal convolution (DFlash 2): `taps` rows, one dynamic weight per `group` channels."""

    taps: int
    group: int


@dataclass(frozen=True)
class Selector:
    """Path selector (DFlash 2): `rank` of its codebooks, `top_k` candidates per position."""

    rank: int
    top_k: int


@dataclass(frozen=True)
class Attention:
    """Per-layer attention rule; `sliding[i]` says whether layer i is a sliding layer.

    `window` (tokens) holds for sliding layers; `causal_full` and `causal_sliding` say whether the rows of a block
    are blind to later rows of it. Reference: `is_causal` holds for all layers; without it sliding layers are
    causal and full layers are not.
    """

    sliding: tuple[bool, ...]
    window: int | None
    causal_full: bool
    causal_sliding: bool

    @property
    def mixed_causality(self) -> bool:
        """Whether two kinds of layers exist and differ, which one flag cannot say."""
        return any(self.sliding) and not all(self.sliding) and self.causal_full != self.causal_sliding

    @property
    def causal(self) -> bool:
        """The one flag stock llama.cpp reads: that of the full layers if there are any."""
        return self.causal_sliding if all(self.sliding) else self.causal_full


@dataclass(frozen=True)
class RopeScaling:
    """Linear or YaRN scaling; `attention_factor` is relative to YaRN's own 0.1 ln(factor) + 1."""

    kind: Literal["linear", "yarn"]
    factor: float
    original_context: int | None = None
    attention_factor: float = 1.0


@dataclass(frozen=True)
class Rope:
    """Rotary embedding: base `theta`, rotated `dimensions` of each head, scaling.

    `frequency_factors` (llama3 type, one per rotated pair) divide the frequencies. `neox` false means that the
    checkpoint pairs neighbouring dimensions, so query and key rows are reordered for llama.cpp's half-split pairs.
    """

    theta: float
    dimensions: int
    scaling: RopeScaling | None = None
    frequency_factors: tuple[float, ...] = ()
    neox: bool = True


@dataclass(frozen=True)
class DrafterConfig:
    """Everything a drafter's config.json says, normalised. Sizes are counts; `taps` are Hugging Face layer ids.

    A tap id is the *output* of that target layer, -1 the embedding's; GGUF names the next layer's input, one higher.
    `activation` is a name that llama.cpp reads, None for its own SiLU. `draft_vocab_size` is set for an own head with
    fewer rows than the vocabulary, `draft_vocab_map` if the user said what `d2t` holds. `mask_embedding`
    [hidden_size] replaces the mask token's row of the target's embedding. `attention_bias` and `attention_sinks` say
    which tensors the checkpoint must have, `unused_tensors` which it may have although no drafting needs them.
    """

    architecture: str
    layers: int
    hidden_size: int
    feed_forward_size: int
    heads: int
    kv_heads: int
    head_dim: int
    context_length: int
    vocab_size: int
    rms_epsilon: float
    block_size: int
    mask_token_id: int
    taps: tuple[int, ...]
    attention: Attention
    rope: Rope
    convolution: Convolution | None = None
    selector: Selector | None = None
    logit_scale: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float | None = None
    attention_value_scale: float | None = None
    activation: str | None = None
    attention_bias: bool = False
    attention_sinks: bool = False
    draft_vocab_size: int | None = None
    draft_vocab_map: Literal["offsets", "absolute"] | None = None
    unused_tensors: tuple[str, ...] = ()
    mask_embedding: tuple[float, ...] | None = field(default=None, repr=False)
    own_embeddings: bool = True
    own_head: bool = True
    tied_embeddings: bool = False
    target_layers: int | None = None
    name_or_path: str | None = None
    notes: tuple[str, ...] = ()
