"""What a drafter needs of its target (tokenizer, sizes, kind of rope), and whether the two belong together."""

from __future__ import annotations

from pathlib import Path

from dflash2.constants import FINAL_TAP_ARCHITECTURES, TAPPABLE_ARCHITECTURES
from dflash2.converter.config import DrafterConfig
from dflash2.converter.targets.facts import Target
from dflash2.converter.targets.gguf_file import parts_of, read_gguf_target
from dflash2.converter.targets.hf_folder import read_hf_target
from dflash2.converter.targets.hf_tokenizer import TOKENIZER_FILE, base_vocabulary
from dflash2.errors import TargetMismatchError, UnsupportedCheckpointError

__all__ = ["Target", "check_pair", "check_tokens", "parts_of", "read_target"]


def read_target(path: Path, label: str | None = None) -> Target:
    """Read a target: a GGUF file, of a split one the first, or a Hugging Face folder (config and tokenizer files).

    `label` names it in messages (a Hub id); the path if None. Raises GGUFError, CheckpointError or
    UnsupportedCheckpointError if it cannot serve as a target.
    """
    path = Path(path)
    read = read_hf_target if path.is_dir() else read_gguf_target
    return read(path, label or str(path))


def check_pair(config: DrafterConfig, target: Target) -> tuple[str, ...]:
    """Check that drafter and target belong together; returns what a user should know although it converts.

    Raises TargetMismatchError for sizes, taps or vocabulary that do not fit, UnsupportedCheckpointError for a rope
    that cannot be kept with this target.
    """
    for problem in _mismatches(config, target):
        raise TargetMismatchError(f"{target.label} is not the target of this drafter: {problem}.")
    if target.uses_mrope and config.rope.frequency_factors:
        raise UnsupportedCheckpointError(
            f"{target.label} uses M-RoPE, with which llama.cpp ignores the drafter's llama3 rope factors."
        )
    return tuple(_warnings(config, target))


def check_tokens(folder: Path, target: Target) -> None:
    """Compare the tokenizer that the drafter's `folder` may carry with the target's, token for token.

    Raises TargetMismatchError naming the first token id that differs. Added tokens are left out: quantisers rename
    reserved ones, and a drafter may put its mask among them.
    """
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        return
    for token_id, text in sorted(base_vocabulary(path).items()):
        known = target.tokens[token_id] if token_id < len(target.tokens) else None
        if known is None or _plain(known) != _plain(text):
            raise TargetMismatchError(
                f"{target.label} is not the target of this drafter: token {token_id} is {text!r} in {path}, and"
                f" {known!r} there; if the drafter was trained with the target's tokenizer, remove that file."
            )


def _plain(text: str) -> str:
    """Converters store the space of some tokens as itself."""
    return text.replace("\u2581", " ")


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
