"""What the metadata and the tensor table of a drafter GGUF say about its cycle, as the loader reads them."""

from __future__ import annotations

from dataclasses import dataclass

from dflash2.converter.checking.forks import MASK_TOKEN
from dflash2.converter.checking.loader_table import MAX_LAYERS, SELECTOR_TENSOR, VOCABULARY_MAP
from dflash2.converter.config import Attention, Convolution, Selector
from dflash2.gguf_info import GGUFInfo

EMBEDDINGS, HEAD = "token_embd.weight", "output.weight"


@dataclass(frozen=True)
class RopeFacts:
    """Rope keys of a drafter GGUF; `sections` are set for M-RoPE targets."""

    theta: float | None
    scaling: str | None
    factor: float | None
    sections: tuple[int, ...]


@dataclass(frozen=True)
class DrafterFacts:
    """Cycle facts of a drafter GGUF; None where the file lacks the key.

    `taps` are GGUF layer ids (the layer whose input is read); `hf_taps` the ids of config.json, one lower.
    `own_embeddings` and `own_head` say which of the two the file carries, `draft_vocab_size` how many rows its head
    has (None: those of the target).
    """

    version: int
    block_size: int | None
    mask_token_id: int | None
    taps: tuple[int, ...]
    attention: Attention
    convolution: Convolution | None
    selector: Selector | None
    rope: RopeFacts
    own_embeddings: bool
    own_head: bool = False
    draft_vocab_size: int | None = None
    logit_scale: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float | None = None
    attention_value_scale: float | None = None

    @property
    def hf_taps(self) -> tuple[int, ...]:
        """Tap ids as the Hugging Face config counts them."""
        return tuple(tap - 1 for tap in self.taps)


def drafter_facts(info: GGUFInfo) -> DrafterFacts:
    """Facts of a drafter in upstream's spelling; raises GGUFError for a count that is no integer."""
    has_selector = SELECTOR_TENSOR in info.tensor_names
    map_rows = [tensor.shape[0] for tensor in info.tensors if tensor.name == VOCABULARY_MAP and tensor.shape]
    return DrafterFacts(
        version=2 if has_selector else 1,
        block_size=info.integer(info.own("block_size")),
        mask_token_id=info.integer(MASK_TOKEN),
        taps=_integers(info, "target_layers"),
        attention=_attention(info),
        convolution=Convolution(_number(info, "conv_kernel_size"), _number(info, "conv_group_size"))
        if has_selector
        else None,
        selector=Selector(_number(info, "selector_rank"), _number(info, "selector_top_k")) if has_selector else None,
        rope=RopeFacts(
            theta=_float(info, "rope.freq_base"),
            scaling=_text(info, "rope.scaling.type"),
            factor=_float(info, "rope.scaling.factor"),
            sections=_integers(info, "rope.dimension_sections"),
        ),
        own_embeddings=EMBEDDINGS in info.tensor_names,
        own_head=HEAD in info.tensor_names,
        draft_vocab_size=map_rows[0] if map_rows else None,
        logit_scale=_float(info, "logit_scale"),
        logit_softcap=_float(info, "final_logit_softcapping"),
        embedding_scale=_float(info, "embedding_scale"),
        attention_value_scale=_float(info, "attention.value_scale"),
    )


def _attention(info: GGUFInfo) -> Attention:
    """As the loader reads it: one flag, false if absent; our own key overrides it for sliding layers."""
    window = info.integer(info.own("attention.sliding_window")) or None
    pattern = info.metadata.get(info.own("attention.sliding_window_pattern"))
    layers = min(info.integer(info.own("block_count")) or 0, MAX_LAYERS)
    causal = bool(info.metadata.get(info.own("attention.causal"), False))
    return Attention(
        sliding=tuple(bool(item) for item in pattern) if window and isinstance(pattern, tuple) else (False,) * layers,
        window=window,
        causal_full=causal,
        causal_sliding=bool(info.metadata.get(info.own("attention.causal_swa"), causal)),
    )


def _text(info: GGUFInfo, suffix: str) -> str | None:
    value = info.metadata.get(info.own(suffix))
    return value if isinstance(value, str) else None


def _float(info: GGUFInfo, suffix: str) -> float | None:
    value = info.metadata.get(info.own(suffix))
    return float(value) if isinstance(value, (int, float)) else None


def _number(info: GGUFInfo, suffix: str) -> int:
    return info.integer(info.own(suffix)) or 0


def _integers(info: GGUFInfo, suffix: str) -> tuple[int, ...]:
    value = info.metadata.get(info.own(suffix))
    return tuple(item for item in value if isinstance(item, int)) if isinstance(value, tuple) else ()
