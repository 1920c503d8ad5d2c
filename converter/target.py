"""What a drafter needs of its target, read from the target's GGUF: tokenizer, sizes, kind of rope."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from dflash2.constants import DRAFTER_ARCHITECTURE, FINAL_TAP_ARCHITECTURES, TAPPABLE_ARCHITECTURES
from dflash2.converter.config import DrafterConfig
from dflash2.errors import GGUFError, TargetMismatchError, UnsupportedCheckpointError
from dflash2.gguf_info import GGUFInfo, read_gguf_info


@dataclass(frozen=True)
class Target:
    """Facts of a target model; `layers` leaves out its own multi-token-prediction layers."""

    info: GGUFInfo = field(repr=False)
    hidden_size: int
    layers: int
    vocab_size: int
    uses_mrope: bool

    @property
    def path(self) -> Path:
        """The GGUF file."""
        return self.info.path

    @property
    def architecture(self) -> str:
        """GGUF architecture name."""
        return self.info.architecture


def read_target(path: Path) -> Target:
    """Read a target GGUF (of a split one: its first file); raises GGUFError if it cannot serve as a target."""
    info = read_gguf_info(path)
    if info.architecture == DRAFTER_ARCHITECTURE:
        raise GGUFError(f"{path} is a drafter itself; give the GGUF of the model it drafts for.")
    if info.integer("split.no"):
        raise GGUFError(f"{path} is not the first file of a split GGUF; give the file that ends in -00001-of-....")
    tokens = info.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, tuple):
        raise GGUFError(f"{path} has no tokenizer (tokenizer.ggml.tokens); give a GGUF of a whole language model.")
    return Target(
        info=info,
        hidden_size=_required(info, "embedding_length"),
        layers=_required(info, "block_count") - (info.integer(info.own("nextn_predict_layers")) or 0),
        vocab_size=len(tokens),
        uses_mrope=info.own("rope.dimension_sections") in info.metadata,
    )


def _required(info: GGUFInfo, suffix: str) -> int:
    value = info.integer(info.own(suffix))
    if value is None:
        raise GGUFError(f"{info.path} has no {info.own(suffix)!r}; give a GGUF of a whole language model.")
    return value


def check_pair(config: DrafterConfig, target: Target) -> tuple[str, ...]:
    """Check that drafter and target belong together; returns what a user should know although it converts.

    Raises TargetMismatchError for sizes, taps or vocabulary that do not fit, UnsupportedCheckpointError for a rope
    that cannot be kept with this target.
    """
    for problem in _mismatches(config, target):
        raise TargetMismatchError(f"{target.path} is not the target of this drafter: {problem}.")
    if target.uses_mrope and config.rope.frequency_factors:
        raise UnsupportedCheckpointError(
            f"{target.path} uses M-RoPE, with which llama.cpp ignores the drafter's llama3 rope factors."
        )
    return tuple(_warnings(config, target))


def _mismatches(config: DrafterConfig, target: Target) -> list[str]:
    problems = []
    if config.hidden_size != target.hidden_size:
        problems.append(f"its hidden size is {target.hidden_size}, the drafter's 'hidden_size' {config.hidden_size}")
    if config.vocab_size != target.vocab_size:
        problems.append(
            f"its vocabulary has {target.vocab_size} tokens, the drafter's 'vocab_size' is {config.vocab_size}"
        )
    if max(config.taps) >= target.layers:
        problems.append(f"it has {target.layers} layers, and 'target_layer_ids' taps layer {max(config.taps)}")
    if config.mask_token_id >= target.vocab_size:
        problems.append(f"'mask_token_id' is {config.mask_token_id}, beyond its {target.vocab_size} tokens")
    return problems


def _warnings(config: DrafterConfig, target: Target) -> list[str]:
    warnings = []
    if target.architecture not in TAPPABLE_ARCHITECTURES:
        warnings.append(
            f"Stock llama.cpp publishes no layer inputs for {target.architecture} targets: this pair cannot run on it."
        )
    elif max(config.taps) == target.layers - 1 and target.architecture not in FINAL_TAP_ARCHITECTURES:
        warnings.append(
            f"The drafter taps the last layer of the target, which stock llama.cpp does not publish for"
            f" {target.architecture}: this pair cannot run on it."
        )
    if config.attention.mixed_causality:
        warnings.append(
            "Sliding layers are causal and full layers are not: stock llama.cpp has one flag and drafts worse,"
            " a patched one follows dflash.attention.causal_swa."
        )
    if config.target_layers is not None and config.target_layers != target.layers:
        warnings.append(
            f"'num_target_layers' is {config.target_layers}, but the target has {target.layers} layers: check the pair."
        )
    return warnings
