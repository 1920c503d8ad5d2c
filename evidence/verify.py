"""Is the output unchanged? Token for token, greedy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash2.evidence.engines import opened
from dflash2.evidence.prompts import texts


@dataclass(frozen=True)
class Difference:
    """Where a prompt's output with drafting first differs: generated token `position` (from 0), both token ids."""

    prompt: int
    position: int
    without_drafting: int
    with_drafting: int


@dataclass(frozen=True)
class Verification:
    """Outcome over `n_prompts` prompts of `n_tokens` generated tokens each; at most one difference per prompt."""

    n_prompts: int
    n_tokens: int
    differences: tuple[Difference, ...]

    @property
    def unchanged(self) -> bool:
        """Whether every token of every prompt is the same with drafting and without."""
        return not self.differences


def verify(
    target: Path,
    drafter: Path,
    prompts: Sequence[str],
    *,
    n_tokens: int = 200,
    progress: Callable[[int, int], None] | None = None,
    **llama_kwargs: Any,
) -> Verification:
    """Compare greedy output with drafting and without, all requests on one object, one after the other.

    `target` and `drafter` are GGUF files, `llama_kwargs` go to `DFlashLlama` (`n_ctx` must hold prompt and tokens);
    `progress(done, total)` counts prompts. Raises what `DFlashLlama` raises.
    """
    differences = []
    with opened(target, drafter, llama_kwargs) as engine:
        for number, prompt in enumerate(engine.tokens_of(prompt, chat=False) for prompt in texts(prompts)):
            expected = engine.generate(prompt, n_tokens, depth=0, past_end=True).tokens
            actual = engine.generate(prompt, n_tokens, past_end=True).tokens
            if (difference := first_difference(number, expected, actual)) is not None:
                differences.append(difference)
            if progress is not None:
                progress(number + 1, len(prompts))
    return Verification(len(prompts), n_tokens, tuple(differences))


def first_difference(prompt: int, expected: Sequence[int], actual: Sequence[int]) -> Difference | None:
    """The first position where two outputs of the same length differ, or None."""
    for position, (without_drafting, with_drafting) in enumerate(zip(expected, actual, strict=True)):
        if without_drafting != with_drafting:
            return Difference(prompt, position, without_drafting, with_drafting)
    return None
