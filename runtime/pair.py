"""Do this target and this drafter belong together? Answered from their GGUF headers, before llama.cpp sees them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dflash2.constants import DRAFTER_ARCHITECTURE, FORK_DRAFTER_ARCHITECTURES, SNAPSHOT_ARCHITECTURES
from dflash2.errors import TargetMismatchError
from dflash2.gguf_info import GGUFInfo, read_gguf_info
from dflash2.native import final_tap_architectures, tappable_architectures
from dflash2.runtime.checks import check_drafter, check_header


@dataclass(frozen=True)
class DrafterSpec:
    """What the runtime needs to know of a drafter.

    Attributes:
        block_size: rows of one draft pass, the anchor's included.
        mask_token: token id of the rows to be drafted.
        taps: target layers whose *input* is injected (GGUF counting).
        top_k: candidates per row of the selector's lattice; 0 for a drafter without selector (v1).
        window: positions an attention layer looks back, when every layer is windowed; None otherwise.
        causal: whether a row of the block sees only earlier rows.
        mixed_causality: whether the file asks for something else in the sliding layers, which stock llama.cpp ignores.
        hidden_size: width of a layer input, the same for target and drafter.
        shares_head: whether embeddings or head are the target's.
        target_layers: layers of the target, its own multi-token-prediction layers left out.
        target_keeps_snapshots: whether the target has a recurrent state that steps back by snapshots.
    """

    block_size: int
    mask_token: int
    taps: tuple[int, ...]
    top_k: int
    window: int | None
    causal: bool
    mixed_causality: bool
    hidden_size: int
    shares_head: bool
    target_layers: int
    target_keeps_snapshots: bool

    @property
    def feature_width(self) -> int:
        """Floats of one injected row: the tapped layers' inputs side by side."""
        return len(self.taps) * self.hidden_size


def read_pair(target: Path, drafter: Path) -> DrafterSpec:
    """Read both headers and check the pair; raises GGUFError or TargetMismatchError."""
    target_info, drafter_info = read_gguf_info(target), read_gguf_info(drafter)
    _check_architectures(target_info, drafter_info)
    check_header(target_info)
    check_header(drafter_info)
    spec = _read_drafter(drafter_info, target_info)
    _check_sizes(target_info, drafter_info, spec)
    return spec


def _check_architectures(target: GGUFInfo, drafter: GGUFInfo) -> None:
    if target.architecture == DRAFTER_ARCHITECTURE:
        raise TargetMismatchError(f"{target.path} is a DFlash drafter; give the target first, the drafter second.")
    if drafter.architecture in FORK_DRAFTER_ARCHITECTURES:
        raise TargetMismatchError(
            f"{drafter.path} is a drafter for a fork of llama.cpp ({drafter.architecture}); run dflash2 upgrade on it."
        )
    if drafter.architecture != DRAFTER_ARCHITECTURE:
        raise TargetMismatchError(
            f"{drafter.path} has the architecture {drafter.architecture!r}, not {DRAFTER_ARCHITECTURE!r}; "
            "convert the drafter's checkpoint with dflash2-convert."
        )
    tappable = tappable_architectures()
    if target.architecture not in tappable:
        raise TargetMismatchError(
            f"{target.path}: llama.cpp does not publish layer inputs for the architecture {target.architecture!r}, "
            f"so no drafter can run on it; supported are {', '.join(sorted(tappable))}."
        )


def _read_drafter(info: GGUFInfo, target: GGUFInfo) -> DrafterSpec:
    top_k = info.integer(info.own("selector_top_k")) or 0
    if (top_k > 0) != ("selector_hidden.weight" in info.tensor_names):
        raise TargetMismatchError(f"{info.path} holds half a selector; convert the checkpoint again.")
    if "markov_w1.weight" in info.tensor_names:
        raise TargetMismatchError(
            f"{info.path} is a DSpark drafter; llama-server runs it with --spec-type draft-dspark."
        )
    causal = info.metadata.get(info.own("attention.causal")) is True
    return DrafterSpec(
        block_size=_required(info, info.own("block_size"), least=2),
        mask_token=_required(info, "tokenizer.ggml.mask_token_id", least=0),
        taps=_taps(info),
        top_k=top_k,
        window=_window(info),
        causal=causal,
        mixed_causality=info.metadata.get(info.own("attention.causal_swa"), causal) is not causal,
        hidden_size=_required(info, info.own("embedding_length"), least=1),
        shares_head=not {"token_embd.weight", "output.weight"} <= info.tensor_names,
        target_layers=_layers(target),
        target_keeps_snapshots=target.architecture in SNAPSHOT_ARCHITECTURES,
    )


def _required(info: GGUFInfo, key: str, *, least: int) -> int:
    value = info.integer(key)
    if value is None or value < least:
        raise TargetMismatchError(f"{info.path}: {key} is {value}; the drafter needs it: convert the checkpoint again.")
    return value


def _taps(info: GGUFInfo) -> tuple[int, ...]:
    taps = info.metadata.get(info.own("target_layers"))
    if not isinstance(taps, tuple) or not taps:
        raise TargetMismatchError(f"{info.path} names no target_layers; convert the checkpoint again.")
    return tuple(int(tap) for tap in taps)


def _window(info: GGUFInfo) -> int | None:
    window = info.integer(info.own("attention.sliding_window"))
    pattern = info.metadata.get(info.own("attention.sliding_window_pattern"))
    all_layers = isinstance(pattern, tuple) and all(pattern)
    return window if window and all_layers else None


def _check_sizes(target: GGUFInfo, drafter: GGUFInfo, spec: DrafterSpec) -> None:
    hidden_size = _required(target, target.own("embedding_length"), least=1)
    if hidden_size != spec.hidden_size:
        raise TargetMismatchError(
            f"{drafter.path} is for targets of hidden size {spec.hidden_size}, {target.path} has {hidden_size}; "
            "use the target the drafter was trained for."
        )
    target_tokens, drafter_tokens = _vocabulary_size(target), _vocabulary_size(drafter)
    if target_tokens != drafter_tokens:
        raise TargetMismatchError(
            f"{drafter.path} has a vocabulary of {drafter_tokens} tokens, {target.path} of {target_tokens}; "
            "convert the drafter again with this target."
        )
    check_drafter(drafter, drafter_tokens, spec.top_k)
    if spec.mask_token >= target_tokens:
        raise TargetMismatchError(
            f"{drafter.path}: the mask token {spec.mask_token} is outside the vocabulary of {target_tokens} tokens."
        )
    last = spec.target_layers - (target.architecture not in final_tap_architectures())
    beyond = [tap for tap in spec.taps if not 0 <= tap <= last]
    if beyond:
        raise TargetMismatchError(
            f"{drafter.path} taps the input of layer {beyond[0]}, {target.path} publishes 0..{last}; "
            "use the target the drafter was trained for."
        )


def _layers(target: GGUFInfo) -> int:
    layers = _required(target, target.own("block_count"), least=1)
    return layers - (target.integer(target.own("nextn_predict_layers")) or 0)


def _vocabulary_size(info: GGUFInfo) -> int:
    tokens = info.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, tuple):
        raise TargetMismatchError(f"{info.path} holds no vocabulary (tokenizer.ggml.tokens); convert it again.")
    return len(tokens)
