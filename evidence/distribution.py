"""Are sampled tokens the target's own in distribution? For verification by rejection, which repeats no text.

Two questions are put to the same engine. Of short texts: the first tokens of many requests with a seed each, against
the exact probabilities of all these texts. Of long ones: where each token of real runs stands among the probabilities
that the target gives after everything before it, which must be uniform. The target's word comes from a context that
has no drafter.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from dflash2.evidence.engines import PythonEngine, Sampling
from dflash2.evidence.fresh import as_tokens, feed, fresh_context, rows
from dflash2.evidence.probabilities import Probabilities, probabilities
from dflash2.evidence.prompts import Prompt
from dflash2.evidence.statistics import LEAST_EXPECTED, LEVEL, detectable, fit, rejected
from dflash2.native import Context, FloatArray, IntArray
from dflash2.runtime import Depth

Counts = npt.NDArray[np.int64]
POWER = 0.9
DISTRIBUTION_CHAINS = (
    Sampling(temperature=1.0),
    Sampling(temperature=1.0, top_k=6),
    Sampling(temperature=0.6, top_k=20, top_p=0.95),
    Sampling(temperature=1.5, min_p=0.05),
)
_FIRST_TOKENS = 3  # the first is never drafted, the others are
_MOST_CONTEXTS = 48  # texts whose next-token probabilities are worked out, the likeliest
_BINS = 20
_EDGE = 0.01  # of probability, around the edge of a truncation
_EXCLUDED = 1e-3  # chance granted to what a chain excludes: by rounding, the edge of a truncation may shift
_BELOW_1 = 1 - 1e-12
_OTHER = -1  # in the place of a token: all those without a cell of their own


@dataclass(frozen=True)
class DistributionTest:
    """One hypothesis: what was drawn has the target's distribution.

    Attributes:
        question: "first tokens" or "whole runs".
        prompt: id of the prompt; empty for all of them together.
        sampling: the chain.
        n: draws.
        freedom: degrees of freedom of the chi-square statistic.
        p: its p-value.
        detectable: the effect (Cohen's w) that the test finds with power POWER at its share of the level.
        fallen: whether the hypothesis falls at the level of the whole set, by Holm's procedure.
    """

    question: str
    prompt: str
    sampling: Sampling
    n: int
    freedom: int
    p: float
    detectable: float
    fallen: bool = False


def check_distribution(
    engine: PythonEngine,
    prompts: Sequence[Prompt],
    *,
    chains: Sequence[Sampling] = DISTRIBUTION_CHAINS,
    depth: Depth | None = None,
    n_draws: int = 2000,
    n_tokens: int = 100,
    n_ctx: int = 0,
    chat: bool = False,
    seed: int = 1,
    level: float = LEVEL,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[DistributionTest, ...]:
    """Test the engine as it verifies now (`engine.llm.verify`).

    Args:
        engine: the pair.
        prompts: each chain has its first tokens tested behind one of them, in turn, and whole runs behind all.
        chains: ways to draw, all with a temperature.
        depth: draft tokens per cycle; None for the engine's own.
        n_draws: requests per chain for the first tokens.
        n_tokens: of each whole run.
        n_ctx: tokens that prompt and answer must fit into; 0 if anything fits.
        chat: put prompts into the target's chat template.
        seed: the first one.
        level: chance that any test falls although all hypotheses hold.
        progress: called with (chains done, chains in all).

    Raises what the engine raises.
    """
    tokenised = [(prompt, engine.tokens_of(prompt, chat=chat)) for prompt in prompts]
    fitting = [(prompt, tokens) for prompt, tokens in tokenised if not n_ctx or len(tokens) + n_tokens <= n_ctx]
    if not fitting:
        return ()
    n_tests = 2 * len(chains)
    found = []
    for number, sampling in enumerate(chains):
        prompt, tokens = fitting[number % len(fitting)]
        counts, exact = _first_tokens(engine, tokens, sampling, n_draws, depth, seed)
        found.append(_tested("first tokens", prompt.id, sampling, counts, exact, level / n_tests))
        places = np.concatenate(
            [_places(engine, tokens, sampling, n_tokens, depth, seed + at) for at, (_, tokens) in enumerate(fitting)]
        )
        counts = np.bincount(np.minimum((places * _BINS).astype(np.int64), _BINS), minlength=_BINS + 1)
        exact = np.append(np.full(_BINS, 1 / _BINS), 0.0)
        found.append(_tested("whole runs", "", sampling, counts, exact, level / n_tests))
        if progress is not None:
            progress(number + 1, len(chains))
    fallen = rejected({at: test.p for at, test in enumerate(found)}, level)
    return tuple(replace(test, fallen=at in fallen) for at, test in enumerate(found))


def _tested(
    question: str, prompt: str, sampling: Sampling, counts: Counts, exact: Probabilities, level: float
) -> DistributionTest:
    n = int(counts.sum())
    p, freedom = fit(counts, exact)
    return DistributionTest(question, prompt, sampling, n, freedom, p, detectable(n, freedom, level, POWER))


def _first_tokens(
    engine: PythonEngine, prompt: Sequence[int], sampling: Sampling, n_draws: int, depth: Depth | None, seed: int
) -> tuple[Counts, Probabilities]:
    """How often each cell of `_cells` was drawn, and its probability."""
    with fresh_context(engine.llm) as context:
        cells, inner = _cells(context, prompt, sampling, n_draws)
    counts: Counter[tuple[int, ...]] = Counter()
    llm = engine.llm
    llm.reset()
    llm.depth = engine.most if depth is None else depth
    for own_seed in range(seed, seed + n_draws):
        llm.set_seed(own_seed)
        stream = llm.generate(list(prompt), **engine.arguments(sampling))  # what the memories share is kept
        counts[_cell_of([next(stream) for _ in range(_FIRST_TOKENS)], inner, cells)] += 1
        stream.close()
    names = [*cells, *(cell for cell in counts if cell not in cells)]
    return np.array([counts[cell] for cell in names]), np.array([cells.get(cell, 0.0) for cell in names])


def _cells(
    context: Context, prompt: Sequence[int], sampling: Sampling, n_draws: int
) -> tuple[dict[tuple[int, ...], float], set[tuple[int, ...]]]:
    """Probabilities of the texts of _FIRST_TOKENS tokens, and the inner nodes of the tree that they make.

    The likeliest nodes are opened; a branch that is too rare to be counted alone goes into its parent's `_OTHER`.
    """
    tokens = as_tokens(prompt)
    feed(context, tokens, 0, context.n_batch)
    cells: dict[tuple[int, ...], float] = {}
    inner: set[tuple[int, ...]] = set()
    waiting: list[tuple[float, tuple[int, ...]]] = [(-1.0, ())]
    while waiting and len(inner) < _MOST_CONTEXTS:
        weight, node = heapq.heappop(waiting)
        cells.pop(node, None)
        inner.add(node)
        p = -weight * probabilities(sampling, _row_after(context, tokens, node), node)
        counted = np.flatnonzero(p * n_draws >= LEAST_EXPECTED)
        cells[(*node, _OTHER)] = max(float(np.delete(p, counted).sum()), -weight * _EXCLUDED)
        for token in counted.tolist():
            child = (*node, token)
            cells[child] = float(p[token])
            if len(child) < _FIRST_TOKENS:
                heapq.heappush(waiting, (-cells[child], child))
    return cells, inner


def _row_after(context: Context, prompt: IntArray, node: tuple[int, ...]) -> FloatArray:
    """Logits after `prompt` and `node`."""
    if node:
        if not context.truncate(len(prompt)):  # a recurrent memory
            context.clear()
            feed(context, prompt, 0, context.n_batch)
        feed(context, as_tokens(node), len(prompt), 1)
    row: FloatArray = context.logits()[-1]
    return row


def _cell_of(drawn: Sequence[int], inner: set[tuple[int, ...]], cells: dict[tuple[int, ...], float]) -> tuple[int, ...]:
    node: tuple[int, ...] = ()
    for token in drawn:
        child = (*node, token)
        if child in inner:
            node = child
        else:
            return child if child in cells else (*node, _OTHER)
    return node


def _places(
    engine: PythonEngine, prompt: Sequence[int], sampling: Sampling, n_tokens: int, depth: Depth | None, seed: int
) -> Probabilities:
    """Of each token of a run: the probability of what is likelier, plus a random share of its own.

    Uniform in [0, 1) and independent if each token has the target's distribution given those before; 1 for a token
    that the chain excludes.
    """
    run = engine.generate(prompt, n_tokens, sampling=sampling, seed=seed, depth=depth, past_end=True)
    random, loose = np.random.default_rng(seed), _loosened(sampling)
    places = []
    with fresh_context(engine.llm) as context:
        feed(context, as_tokens(prompt), 0, context.n_batch)
        row = context.logits()[-1]
        behind = rows(context, as_tokens(run.tokens[:-1]), len(prompt), [1])
        for at, token in enumerate(run.tokens):
            p = probabilities(sampling, row, run.tokens[:at])
            own = p[token]
            place = float(p[p > own].sum() + random.random() * own)
            if own == 0 and not probabilities(loose, row, run.tokens[:at])[token]:
                places.append(1.0)
            else:
                places.append(min(place, _BELOW_1))
            row = next(behind, row)
    return np.array(places)


def _loosened(sampling: Sampling) -> Sampling:
    """A chain that keeps a little more: what lies on the edge of truncation falls either way by rounding."""
    return replace(
        sampling,
        top_k=sampling.top_k + 1 if sampling.top_k else 0,
        top_p=min(1.0, sampling.top_p + _EDGE),
        min_p=sampling.min_p * (1 - 2 * _EDGE),
    )
