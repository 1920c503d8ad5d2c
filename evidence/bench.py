"""How much faster is it? Accepted length and cost of a cycle, kept apart: their ratio is the speedup."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from dflash2.evidence.engines import Run, opened
from dflash2.evidence.prompts import texts

_NGRAM = 4


@dataclass(frozen=True)
class PromptRuns:
    """One prompt (its number in the list given), generated without drafting and with it."""

    prompt: int
    plain: Run
    drafted: Run

    @property
    def equal(self) -> bool:
        """Whether both runs gave the same token ids."""
        return self.plain.tokens == self.drafted.tokens

    @property
    def distinct(self) -> float:
        """Share of distinct 4-grams in the drafted output, 0..1; a continuation that loops has few."""
        tokens = self.drafted.tokens
        ngrams = [tokens[i : i + _NGRAM] for i in range(len(tokens) - _NGRAM + 1)]
        return len(set(ngrams)) / len(ngrams) if ngrams else 1.0


@dataclass(frozen=True)
class Bench:
    """Paired runs over several prompts. Times are of generation alone, prefill left out.

    Times per token and per cycle hardly depend on the prompt, so their medians over the prompts are taken; the
    accepted length depends on it strongly and is no measurement but a count, so all cycles are taken together.
    """

    runs: tuple[PromptRuns, ...]

    def without_loops(self, least_distinct: float = 0.6) -> Bench:
        """Only the prompts whose continuation has at least that share of distinct 4-grams."""
        return replace(self, runs=tuple(run for run in self.runs if run.distinct >= least_distinct))

    @property
    def n_equal(self) -> int:
        """Prompts whose token ids are the same with drafting and without."""
        return sum(run.equal for run in self.runs)

    @property
    def accepted_length(self) -> float:
        """L: tokens per verify pass, the target's own included."""
        return 1 + self._total("accepted") / self._total("cycles")

    @property
    def acceptance(self) -> float:
        """Share of verified draft tokens that were accepted, 0..1."""
        return self._total("accepted") / self._total("drafted")

    @property
    def token_seconds(self) -> float:
        """Time of one token without drafting."""
        return median(run.plain.seconds / (len(run.plain.tokens) - 1) for run in self.runs)

    @property
    def cycle_seconds(self) -> float:
        """Time of one cycle."""
        return median(run.drafted.seconds / run.drafted.stats.cycles for run in self.runs)

    @property
    def cycle_cost(self) -> float:
        """c(w): time of one cycle over the time of one token without drafting, at this depth."""
        return self.cycle_seconds / self.token_seconds

    @property
    def speedup(self) -> float:
        """Tokens per second with drafting over those without: L / c(w)."""
        return self.accepted_length / self.cycle_cost

    @property
    def plain_tokens_per_second(self) -> float:
        """Tokens per second without drafting."""
        return 1 / self.token_seconds

    @property
    def drafted_tokens_per_second(self) -> float:
        """Tokens per second with drafting."""
        return self.accepted_length / self.cycle_seconds

    @property
    def stage_ms(self) -> Mapping[str, float]:
        """Mean milliseconds per cycle and stage."""
        stages = self.runs[0].drafted.stats.seconds
        cycles = self._total("cycles")
        return {stage: 1000 * sum(run.drafted.stats.seconds[stage] for run in self.runs) / cycles for stage in stages}

    def _total(self, count: str) -> int:
        return sum(int(getattr(run.drafted.stats, count)) for run in self.runs)


def bench(
    target: Path,
    drafter: Path,
    prompts: Sequence[str],
    *,
    n_tokens: int = 200,
    progress: Callable[[int, int], None] | None = None,
    **llama_kwargs: Any,
) -> Bench:
    """Generate greedily after every prompt without drafting and with it, in alternating order, on one object.

    Both sides are measured at `generate()`, after a discarded warm-up of both. `target` and `drafter` are GGUF
    files, `llama_kwargs` go to `DFlashLlama` (`n_ctx` must hold prompt and tokens); `n_tokens` is at least 2;
    `progress(done, total)` counts prompts. Raises what `DFlashLlama` raises.
    """
    runs = []
    with opened(target, drafter, llama_kwargs) as engine:
        depth = engine.most
        tokenised = [engine.tokens_of(prompt, chat=False) for prompt in texts(prompts)]
        for warm_up in (0, depth):
            engine.generate(tokenised[0], n_tokens, depth=warm_up, past_end=True)
        for number, prompt in enumerate(tokenised):
            # Whichever runs second profits or suffers from what the machine did meanwhile: take turns.
            order = (0, depth) if number % 2 == 0 else (depth, 0)
            results = {at: engine.generate(prompt, n_tokens, depth=at, past_end=True) for at in order}
            runs.append(PromptRuns(number, results[0], results[depth]))
            if progress is not None:
                progress(number + 1, len(prompts))
    return Bench(tuple(runs))
