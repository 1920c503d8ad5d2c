"""Is the output unchanged? Token for token, greedy and sampled with a seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dflash2.errors import EvidenceError
from dflash2.evidence.engines import GREEDY, Engine, PythonEngine, Run, Sampling
from dflash2.evidence.prompts import Prompt
from dflash2.evidence.ties import Judgement, judge
from dflash2.runtime import Depth, Verify

_CONFIDENCE_95 = 3.0  # -ln 0.05: with no event among n, the rate is below 3 / n at 95% confidence
END = -1  # in the place of a token id where one text had ended


@dataclass(frozen=True)
class Setting:
    """How tokens are drawn and, by an engine in this process, how drafts are verified (None: as the engine does)."""

    sampling: Sampling = GREEDY
    verify: Verify | None = None

    def __str__(self) -> str:
        return str(self.sampling) if self.verify is None else f"{self.sampling}; {self.verify}"


CHAINS = (
    Sampling(temperature=1.0),
    Sampling(temperature=0.8, top_k=40, top_p=0.95),
    Sampling(temperature=0.7, min_p=0.05),
    Sampling(temperature=1.0, top_p=0.9, repeat_penalty=1.2, frequency_penalty=0.2),
)
GREEDILY = (Setting(),)
SEED_EXACT: tuple[Verify, ...] = ("coupled", "match")
PENALISED = Setting(Sampling(repeat_penalty=1.2))  # greedy behind a chain
IN_PROCESS = (*(Setting(chain, mode) for mode in SEED_EXACT for chain in CHAINS), PENALISED)
OVER_URL = (*(Setting(chain) for chain in CHAINS), PENALISED)


@dataclass(frozen=True)
class Difference:
    """Where a run with drafting first differs: generated token `position` (from 0), both token ids (END: none).

    `judgement` is what contexts without drafter say of it; None where they cannot be asked.
    """

    position: int
    without_drafting: int
    with_drafting: int
    judgement: Judgement | None = None

    @property
    def is_tie(self) -> bool:
        """Whether llama.cpp's own rounding explains it."""
        return self.judgement is not None and self.judgement.is_tie


@dataclass(frozen=True)
class Comparison:
    """One prompt under one setting at one depth, against the same request without drafting.

    Attributes:
        prompt, category: the prompt's id and set.
        setting: how it was drawn.
        depth: draft tokens per cycle; None for the engine's own.
        n_prompt: tokens of the prompt.
        n_equal: generated tokens that are the same in both runs, up to the first difference.
        run: the run with drafting.
        difference: None if there is none.
    """

    prompt: str
    category: str
    setting: Setting
    depth: Depth | None
    n_prompt: int
    n_equal: int
    run: Run
    difference: Difference | None


@dataclass(frozen=True)
class Verification:
    """Outcome over all comparisons; `left_out` are ids of prompts that do not fit the context."""

    comparisons: tuple[Comparison, ...]
    left_out: tuple[str, ...]

    @property
    def differences(self) -> tuple[Comparison, ...]:
        """The comparisons that differ and are no near-ties."""
        return tuple(one for one in self.comparisons if one.difference is not None and not one.difference.is_tie)

    @property
    def ties(self) -> tuple[Comparison, ...]:
        """The comparisons that differ by a near-tie."""
        return tuple(one for one in self.comparisons if one.difference is not None and one.difference.is_tie)

    @property
    def unchanged(self) -> bool:
        """Whether drafting changes nothing, near-ties aside."""
        return not self.differences

    @property
    def n_equal(self) -> int:
        """Tokens compared and found equal."""
        return sum(one.n_equal for one in self.comparisons)

    @property
    def n_accepted(self) -> int:
        """Draft tokens that were accepted: where an error of the verifier would show."""
        return sum(one.run.stats.accepted for one in self.comparisons)

    @property
    def most_errors(self) -> float:
        """Share of accepted drafts that may be wrong all the same, at 95% confidence, if no difference was found."""
        return min(1.0, _CONFIDENCE_95 / self.n_accepted) if self.n_accepted else 1.0

    @property
    def accepted_length(self) -> float:
        """Tokens per verify pass over all runs; 0 if none drafted."""
        cycles = sum(one.run.stats.cycles for one in self.comparisons)
        return 1 + self.n_accepted / cycles if cycles else 0.0


def verify(
    engine: Engine,
    prompts: Sequence[Prompt],
    *,
    settings: Sequence[Setting] = (*GREEDILY, *IN_PROCESS),
    every_setting: bool = False,
    depths: Sequence[Depth | None] = (None,),
    n_tokens: int = 100,
    n_ctx: int = 0,
    chat: bool = False,
    seed: int = 1,
    reference: Engine | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Verification:
    """Compare what `engine` generates with drafting and without, request by request.

    Args:
        engine: the pair.
        prompts: each is generated greedily if the first setting is greedy, and under the others.
        settings: ways to draw.
        every_setting: every prompt under every setting; otherwise under the first, and one of the others in turn.
        depths: draft tokens per cycle.
        n_tokens: generated per run, at least 1; fewer where a text ends.
        n_ctx: tokens that prompt and answer must fit into; 0 if anything fits.
        chat: put prompts into the target's chat template.
        seed: of the first prompt; the others count on.
        reference: an engine that has no drafter; by default `engine` itself, at depth 0.
        progress: called with (runs done, runs in all).

    Raises what the engine raises, and EvidenceError for a reference that drafts.
    """
    tokenised = [(prompt, engine.tokens_of(prompt, chat=chat)) for prompt in prompts]
    fitting = [(prompt, tokens) for prompt, tokens in tokenised if not n_ctx or len(tokens) + n_tokens <= n_ctx]
    plan = [
        (prompt, tokens, setting, seed + number)
        for number, (prompt, tokens) in enumerate(fitting)
        for setting in (settings if every_setting else _in_turn(settings, number))
    ]
    comparisons: list[Comparison] = []
    for done, (prompt, tokens, setting, own_seed) in enumerate(plan):
        request = _Request(engine, tuple(tokens), setting, own_seed, n_tokens)
        expected = request.run(engine, 0) if reference is None else request.run(reference, None)
        if expected.stats.drafted:
            raise EvidenceError("The reference drafts too, so it proves nothing; start it without a drafter.")
        comparisons += [request.compare(prompt, expected, depth) for depth in depths]
        if progress is not None:
            progress(done + 1, len(plan))
    kept = {prompt.id for prompt, _ in fitting}
    return Verification(tuple(comparisons), tuple(prompt.id for prompt in prompts if prompt.id not in kept))


def _in_turn(settings: Sequence[Setting], number: int) -> Sequence[Setting]:
    first, *others = settings
    return [first, others[number % len(others)]] if others else [first]


@dataclass(frozen=True)
class _Request:
    engine: Engine
    tokens: tuple[int, ...]
    setting: Setting
    seed: int
    n_tokens: int

    def run(self, engine: Engine, depth: Depth | None) -> Run:
        if self.setting.verify is not None and isinstance(engine, PythonEngine):
            engine.llm.verify = self.setting.verify
        sampling = self.setting.sampling
        return engine.generate(self.tokens, self.n_tokens, sampling=sampling, seed=self.seed, depth=depth)

    def compare(self, prompt: Prompt, expected: Run, depth: Depth | None) -> Comparison:
        run = self.run(self.engine, depth)
        difference = first_difference(expected.tokens, run.tokens)
        n_equal = len(run.tokens) if difference is None else difference.position
        if difference is not None:
            difference = self._judged(difference, run)
        return Comparison(prompt.id, prompt.category, self.setting, depth, len(self.tokens), n_equal, run, difference)

    def _judged(self, difference: Difference, run: Run) -> Difference:
        rivals = (difference.without_drafting, difference.with_drafting)
        if not isinstance(self.engine, PythonEngine) or END in rivals:
            return difference
        judgement = judge(
            self.engine,
            self.tokens,
            run.tokens[: difference.position],
            rivals,
            width=1 + max((at for at, n in enumerate(run.stats.at_depth) if n), default=0),
            sampling=self.setting.sampling,
            seed=self.seed,
        )
        return replace(difference, judgement=judgement)


def first_difference(expected: Sequence[int], actual: Sequence[int]) -> Difference | None:
    """The first position where two outputs differ, one of them ending there included; None if there is none."""
    for position in range(max(len(expected), len(actual))):
        pair = tuple(tokens[position] if position < len(tokens) else END for tokens in (expected, actual))
        if pair[0] != pair[1]:
            return Difference(position, pair[0], pair[1])
    return None
