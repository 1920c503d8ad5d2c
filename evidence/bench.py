"""How much faster is it? Accepted length and cost of a cycle, kept apart: their ratio is the speedup."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import Any

from dflash2.errors import EvidenceError
from dflash2.evidence.engines import Engine, Run, opened
from dflash2.evidence.intervals import LEVEL, MedianInterval, median_interval
from dflash2.evidence.prompts import Prompt, texts
from dflash2.runtime import Depth

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
    def token_seconds(self) -> float:
        """Time of one token without drafting."""
        return self.plain.seconds / (len(self.plain.tokens) - 1)

    @property
    def cycle_seconds(self) -> float:
        """Time of one verify pass with all that belongs to it."""
        return self.drafted.seconds / self.drafted.passes

    @property
    def speedup(self) -> float:
        """Tokens per second with drafting over those without, of this prompt."""
        return self.token_seconds * (len(self.drafted.tokens) - 1) / self.drafted.seconds

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
        """L: tokens per verify pass, the target's own included; 1 without drafting."""
        return 1 + self._total("accepted") / self._passes

    @property
    def acceptance(self) -> float:
        """Share of verified draft tokens that were accepted, 0..1; 0 without drafting."""
        return self._total("accepted") / max(1, self._total("drafted"))

    @property
    def acceptance_at(self) -> tuple[float, ...]:
        """Share of the cycles that accepted the draft of block row i + 1, of those that accepted all before it.

        Empty if the engine does not tell; rows that were never verified are left out.
        """
        accepted, reached = (
            [sum(at) for at in zip_longest(*(getattr(run.drafted.stats, name) for run in self.runs), fillvalue=0)]
            for name in ("accepted_at", "reached_at")
        )
        return tuple(a / r for a, r in zip(accepted, reached, strict=False) if r)

    @property
    def token_seconds(self) -> float:
        """Time of one token without drafting."""
        return median(run.token_seconds for run in self.runs)

    @property
    def cycle_seconds(self) -> float:
        """Time of one cycle."""
        return median(run.cycle_seconds for run in self.runs)

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

    def paired_speedup(self, level: float = LEVEL) -> MedianInterval:
        """Median over the prompts of the ratio of both runs' tokens per second, with its interval."""
        return median_interval((run.speedup for run in self.runs), level)

    @property
    def stage_ms(self) -> Mapping[str, float]:
        """Mean milliseconds per verify pass and stage; empty if the engine does not tell."""
        stages = self.runs[0].drafted.stats.seconds
        return {
            stage: 1000 * sum(run.drafted.stats.seconds[stage] for run in self.runs) / self._passes for stage in stages
        }

    @property
    def wall_ms(self) -> float:
        """Mean milliseconds per verify pass by the clock outside, which `stage_ms` should add up to."""
        return 1000 * sum(run.drafted.seconds for run in self.runs) / self._passes

    @property
    def _passes(self) -> int:
        return sum(run.drafted.passes for run in self.runs)

    def _total(self, count: str) -> int:
        return sum(int(getattr(run.drafted.stats, count)) for run in self.runs)


@dataclass(frozen=True)
class Variant:
    """One way to generate: an engine, and how many draft tokens it verifies per cycle (as `Engine.generate` says)."""

    name: str
    engine: Engine
    depth: Depth | None = None


@dataclass(frozen=True)
class Measured:
    """A `Bench` of every variant by its name; all share the runs without drafting.

    `left_out` are ids of prompts that do not fit the context or whose text ended with its first token.
    """

    benches: Mapping[str, Bench]
    left_out: tuple[str, ...] = ()


def measure(
    reference: Variant,
    variants: Sequence[Variant],
    prompts: Sequence[Prompt],
    *,
    n_tokens: int,
    chat: bool = False,
    past_end: bool = False,
    n_ctx: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Measured:
    """Generate greedily after every prompt with `reference` and with every variant, which take turns at going first.

    Each is warmed up once on the first prompt; that run is discarded.

    Args:
        reference: what does not draft; its engine says what the tokens of a prompt are.
        variants: what is compared with it, names unlike each other; all of one target.
        prompts: what is continued, at least one.
        n_tokens: most tokens per prompt, at least 2.
        chat: put the prompts into the target's chat template.
        past_end: go on behind the end of a text, so that every run has `n_tokens`.
        n_ctx: tokens that prompt and answer must fit into; 0 if anything fits.
        progress: called with (prompts done, prompts in all).

    Raises EvidenceError if nothing could be measured, and what the engines raise.
    """
    every = (reference, *variants)
    tokenised = [(number, reference.engine.tokens_of(prompt, chat=chat)) for number, prompt in enumerate(prompts)]
    fitting = [(number, tokens) for number, tokens in tokenised if not n_ctx or len(tokens) + n_tokens <= n_ctx]
    if fitting:
        for one in every:
            one.engine.generate(fitting[0][1], n_tokens, depth=one.depth, past_end=past_end)
    runs: dict[str, list[PromptRuns]] = {one.name: [] for one in variants}
    measured = set()
    for turn, (number, tokens) in enumerate(fitting):
        # Whichever runs first profits or suffers from what the machine did before: take turns.
        first = turn % len(every)
        found = {
            index: every[index].engine.generate(tokens, n_tokens, depth=every[index].depth, past_end=past_end)
            for index in (*range(first, len(every)), *range(first))
        }
        if all(len(run.tokens) > 1 for run in found.values()):
            measured.add(number)
            for index, one in enumerate(variants, 1):
                runs[one.name].append(PromptRuns(number, found[0], found[index]))
        if progress is not None:
            progress(turn + 1, len(fitting))
    if not measured:
        raise EvidenceError("No prompt fits the context and is answered with two tokens or more; raise the context.")
    left_out = tuple(prompt.id for number, prompt in enumerate(prompts) if number not in measured)
    return Measured({name: Bench(tuple(of_one)) for name, of_one in runs.items()}, left_out)


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

    As `measure` does it, every run with `n_tokens`. `target` and `drafter` are GGUF
    files, `llama_kwargs` go to `DFlashLlama` (`n_ctx` must hold prompt and tokens); `n_tokens` is at least 2;
    `progress(done, total)` counts prompts. Raises what `DFlashLlama` raises.
    """
    with opened(target, drafter, llama_kwargs) as engine:
        measured = measure(
            Variant("plain", engine, 0),
            [Variant("drafted", engine)],
            texts(prompts),
            n_tokens=n_tokens,
            past_end=True,
            progress=progress,
        )
    return measured.benches["drafted"]
