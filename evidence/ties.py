"""Near-ties: is a difference between two outputs llama.cpp's rounding, or an error?

A token's logits may depend a little on how many rows are evaluated with it. Then two candidates that are nearly level
may change places, whoever groups the rows. The judges are contexts without drafter: one evaluates what was generated
token by token, the others in batches of the verify width, one for each way that the batches can fall. The path that is
under suspicion has no say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dflash2.evidence.engines import GREEDY, PythonEngine, Sampling
from dflash2.evidence.fresh import as_tokens, feed, fresh_context, rows
from dflash2.native import FloatArray

MOST_GAP = 0.05  # logits; a wider gap is never excused
_MOST_LISTED = 10


@dataclass(frozen=True)
class Candidate:
    """A token level with the best one within MOST_GAP, and its logit in each evaluation of a `Judgement`."""

    token: int
    text: str
    logits: tuple[float, ...]


@dataclass(frozen=True)
class Judgement:
    """What contexts without drafter say of one position.

    Attributes:
        is_tie: whether they explain the difference.
        reason: why, or why not, in words.
        evaluations: how each evaluated the generated tokens: "one by one", then "in 8s, the first batch of 3", ...
        candidates: all tokens within MOST_GAP of the best of the first evaluation, and the two in question.
    """

    is_tie: bool
    reason: str
    evaluations: tuple[str, ...]
    candidates: tuple[Candidate, ...]


def judge(
    engine: PythonEngine,
    prompt: Sequence[int],
    generated: Sequence[int],
    rivals: tuple[int, int],
    *,
    width: int,
    sampling: Sampling = GREEDY,
    seed: int = 0,
) -> Judgement:
    """Judge the position behind `prompt` and `generated`, where one run has the first of `rivals`, one the second.

    Greedy runs tie if the evaluations disagree about the gap between the rivals by more than the gap itself, which is
    at most MOST_GAP. Sampled runs tie if each rival is what the same seed gives for the row of some evaluation, and no
    logit differs between evaluations by more than MOST_GAP. `width`: rows of a verify pass.
    """
    labels, found = _evaluate(engine, prompt, generated, width)
    first = found[0]
    listed = np.flatnonzero(first >= first.max() - MOST_GAP)
    best = [int(token) for token in listed[np.argsort(-first[listed])][:_MOST_LISTED]]
    tokens = [*rivals, *(token for token in best if token not in rivals)]
    candidates = tuple(
        Candidate(token, engine.text_of([token]), tuple(float(row[token]) for row in found)) for token in tokens
    )
    if sampling == GREEDY:
        is_tie, reason = _greedy_tie([float(row[rivals[0]]) - float(row[rivals[1]]) for row in found])
    else:
        spread = max(float(np.abs(row - first).max()) for row in found)
        chosen = [_chosen(engine, prompt, len(generated), row, sampling, seed) for row in found]
        is_tie, reason = _sampled_tie(rivals, chosen, spread)
    return Judgement(is_tie, reason, tuple(labels), candidates)


def _evaluate(
    engine: PythonEngine, prompt: Sequence[int], generated: Sequence[int], width: int
) -> tuple[list[str], list[FloatArray]]:
    """The last row of each way to evaluate `generated`; the prompt, which no cycle touches, goes in as a whole."""
    labels, found = [], []
    tokens, behind = as_tokens(prompt), as_tokens(generated)
    ways = [("one by one", [1]), *((f"in {width}s, the first batch of {k}", [k, width]) for k in range(1, width + 1))]
    with fresh_context(engine.llm) as context:
        for label, widths in ways:
            context.clear()
            feed(context, tokens, 0, context.n_batch)
            row = context.logits()[-1]
            for row in rows(context, behind, len(tokens), widths):  # noqa: B007
                pass
            labels.append(label)
            found.append(row.copy())
    return labels, found


def _greedy_tie(gaps: list[float]) -> tuple[bool, str]:
    gap = abs(gaps[0])
    disagreement = max(abs(other - gaps[0]) for other in gaps)
    said = f"the gap is {gap:.2e}, and evaluations without drafting disagree about it by {disagreement:.2e}"
    if gap > MOST_GAP:
        return False, f"{said}: a gap above {MOST_GAP} is never a tie"
    return disagreement > gap, said


def _sampled_tie(rivals: tuple[int, int], chosen: list[int], spread: float) -> tuple[bool, str]:
    said = f"evaluations without drafting differ by up to {spread:.2e} and give the tokens {sorted(set(chosen))}"
    if spread > MOST_GAP:
        return False, f"{said}: a difference above {MOST_GAP} is never a tie"
    return set(rivals) <= set(chosen), said


def _chosen(
    engine: PythonEngine, prompt: Sequence[int], index: int, row: FloatArray, sampling: Sampling, seed: int
) -> int:
    """Token number `index` of the run without drafting, if its row of logits had been `row`."""
    from llama_cpp import LogitsProcessorList

    asked = 0

    def replaced(_tokens: object, logits: FloatArray) -> FloatArray:
        nonlocal asked
        asked += 1
        return row if asked == index + 1 else logits

    engine.llm.reset()
    engine.llm.depth = 0
    engine.llm.set_seed(seed)
    arguments = engine.arguments(sampling)
    stream = engine.llm.generate(list(prompt), logits_processor=LogitsProcessorList([replaced]), **arguments)
    tokens = [next(stream) for _ in range(index + 1)]
    stream.close()
    return int(tokens[index])
