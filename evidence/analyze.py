"""Why is acceptance what it is? The drafter's candidates behind the target's own text, position by position.

Arrays: A anchors of a text, n = block size - 1 drafted positions behind each, K candidates of a position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import numpy.typing as npt

from dflash2.errors import EvidenceError
from dflash2.evidence.engines import PythonEngine
from dflash2.evidence.lattices import CycleLattice, cycle_lattice
from dflash2.evidence.prompts import Prompt
from dflash2.native import IntArray
from dflash2.runtime import Lattice

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
N_BINS = 10


@dataclass(frozen=True)
class Observed:
    """One text: what the target wants, and what the drafter offers behind its anchors.

    Attributes:
        wanted: the target's own tokens [A, n].
        ids: the drafter's candidates [A, n, K], the likeliest by its logits first.
        path: what it proposes [A, n].
        q: the probability [A, n] of each proposed token among its candidates.
    """

    wanted: IntArray
    ids: IntArray
    path: IntArray
    q: Floats

    @property
    def candidates_right(self) -> Bools:
        """Whether each candidate is what the target wants, [A, n, K]."""
        found: Bools = self.ids == self.wanted[:, :, None]
        return found

    @property
    def path_right(self) -> Bools:
        """Whether each proposed token is, [A, n]."""
        found: Bools = self.path == self.wanted
        return found


@dataclass(frozen=True)
class Lengths:
    """Accepted length, the target's own token included: of the likeliest candidates, the path, and the best of K."""

    top_1: float
    path: float
    oracle: float


@dataclass(frozen=True)
class Position:
    """One drafted position of the block, 1 for the one behind the anchor.

    Attributes:
        position: which.
        recall: recall@1 .. recall@K: share of anchors where the target's token is among the k likeliest candidates.
        n: anchors whose path is right before this position; the following are counts of these.
        top_1_right: the likeliest candidate is what the target wants.
        path_right: the path's token is.
        fixed: the path's token is, and the likeliest is not.
        spoiled: the likeliest is, and the path's token is not.
    """

    position: int
    recall: tuple[float, ...]
    n: int
    top_1_right: int
    path_right: int
    fixed: int
    spoiled: int


@dataclass(frozen=True)
class Bin:
    """Proposed tokens with q in low..high: how many, their mean q, and the share that the target wants."""

    low: float
    high: float
    n: int
    mean_q: float
    right: float


@dataclass(frozen=True)
class Calibration:
    """`error`: expected calibration error, sum over bins of n / N * |right - mean q|; empty bins are left out."""

    n: int
    error: float
    bins: tuple[Bin, ...]


@dataclass(frozen=True)
class Analysis:
    """What `analyze` found.

    Attributes:
        n_texts, n_anchors: how much it rests on.
        everywhere: accepted lengths, mean over all anchors.
        in_cycles: accepted lengths where each cycle starts behind what the last one accepted, as in generation; None
            if not every position was an anchor.
        positions: one entry per drafted position.
        calibration: of q, over the path's tokens up to the first wrong one.
        left_out: ids of prompts that do not fit the context or whose text ended at once.
        lattices: of the first cycles, as many as were asked for.
    """

    n_texts: int
    n_anchors: int
    everywhere: Lengths
    in_cycles: Lengths | None
    positions: tuple[Position, ...]
    calibration: Calibration
    left_out: tuple[str, ...] = ()
    lattices: tuple[CycleLattice, ...] = ()


def analyze(
    engine: PythonEngine,
    prompts: Sequence[Prompt],
    *,
    n_tokens: int = 100,
    stride: int = 1,
    chat: bool = False,
    n_lattices: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Analysis:
    """Generate greedily without drafting, and look at the drafter behind the tokens of each text.

    Args:
        engine: the pair.
        prompts: one text each.
        n_tokens: anchors of a text, those skipped included; fewer where it ends. The text is a block longer.
        stride: take every so many tokens as an anchor.
        chat: put prompts into the target's chat template.
        n_lattices: keep the lattices of so many cycles, from the first text on; each cycle starts behind what the last
            one accepted, or at the next anchor where that was skipped.
        progress: called with (prompts done, prompts in all).

    Raises EvidenceError if no text is left, and what the engine raises.
    """
    observed: list[Observed] = []
    kept: list[CycleLattice] = []
    left_out = []
    for number, prompt in enumerate(prompts, 1):
        drafts = _drafts(engine, engine.tokens_of(prompt, chat=chat), n_tokens, stride)
        if drafts is None:
            left_out.append(prompt.id)
        else:
            observed.append(drafts.observed)
            kept += islice(_cycles(engine, prompt.id, drafts), n_lattices - len(kept))
        if progress is not None:
            progress(number, len(prompts))
    if not observed:
        raise EvidenceError("no text is long enough to look at; raise the context, or give other prompts.")
    return replace(summarize(observed, every_position=stride == 1, left_out=left_out), lattices=tuple(kept))


@dataclass(frozen=True)
class _Drafts:
    """The lattices behind the anchors `firsts` [A] of a generated `text`."""

    text: Sequence[int]
    firsts: Sequence[int]
    lattices: Sequence[Lattice]

    @property
    def observed(self) -> Observed:
        """The same as arrays."""
        n = len(self.lattices[0].tokens)
        return Observed(
            wanted=np.array([self.text[first + 1 : first + 1 + n] for first in self.firsts], np.int32),
            ids=np.stack([lattice.ids for lattice in self.lattices]),
            path=np.stack([lattice.tokens for lattice in self.lattices]),
            q=np.stack([lattice.q for lattice in self.lattices]),
        )


def _cycles(engine: PythonEngine, prompt: str, drafts: _Drafts) -> Iterator[CycleLattice]:
    """The cycles of one text, each behind what the last one accepted."""
    reached = 0
    for first, lattice in zip(drafts.firsts, drafts.lattices, strict=True):
        if first >= reached:
            found = cycle_lattice(engine, prompt, drafts.text, first, lattice)
            reached = first + found.accepted + 1
            yield found


def _drafts(engine: PythonEngine, prompt: Sequence[int], n_tokens: int, stride: int) -> _Drafts | None:
    """The drafter behind the generated tokens that a whole block of text follows; None if there are none."""
    drafted = engine.llm.block_size - 1
    if len(prompt) + n_tokens + drafted > engine.llm.n_ctx():
        return None
    text = engine.generate(prompt, n_tokens + drafted, depth=0).tokens
    firsts = range(0, len(text) - drafted, stride)
    if not firsts:
        return None
    engine.llm.depth = engine.most
    return _Drafts(text, firsts, engine.llm.lattices([*prompt, *text], [len(prompt) + first for first in firsts]))


def summarize(observed: Sequence[Observed], *, every_position: bool = True, left_out: Sequence[str] = ()) -> Analysis:
    """The figures of texts that were looked at; `every_position`: whether every token of them was an anchor."""
    hits = np.concatenate([one.candidates_right for one in observed])
    right = np.concatenate([one.path_right for one in observed])
    q = np.concatenate([one.q for one in observed])
    lengths = [_each_length(one) for one in observed]
    return Analysis(
        n_texts=len(observed),
        n_anchors=len(right),
        everywhere=Lengths(*(float(np.concatenate(kind).mean()) for kind in zip(*lengths, strict=True))),
        in_cycles=Lengths(*(_in_cycles(kind) for kind in zip(*lengths, strict=True))) if every_position else None,
        positions=_positions(hits, right),
        calibration=calibrate(q[_reached(right)], right[_reached(right)]),
        left_out=tuple(left_out),
    )


def _each_length(observed: Observed) -> tuple[IntArray, IntArray, IntArray]:
    """Accepted lengths [A] of the likeliest candidates, of the path, and of the best that K candidates allow."""
    hits = observed.candidates_right
    return _accepted(hits[:, :, 0]), _accepted(observed.path_right), _accepted(np.logical_or.reduce(hits, axis=2))


def _accepted(right: Bools) -> IntArray:
    """Tokens [A] up to the first wrong one of `right` [A, n], plus the target's own."""
    lengths: IntArray = 1 + np.logical_and.accumulate(right, axis=1).sum(axis=1, dtype=np.int32)
    return lengths


def _in_cycles(texts: Sequence[IntArray]) -> float:
    """Tokens per cycle over `texts`: each holds the length [A] of the cycle that starts at every position."""
    cycles = tokens = 0
    for lengths in texts:
        at = 0
        while at < len(lengths):
            cycles, tokens = cycles + 1, tokens + int(lengths[at])
            at += int(lengths[at])
    return tokens / cycles


def _reached(right: Bools) -> Bools:
    """Where all earlier positions of the path are right, [A, n]."""
    reached = np.ones_like(right)
    reached[:, 1:] = np.logical_and.accumulate(right, axis=1)[:, :-1]
    return reached


def _positions(hits: Bools, right: Bools) -> tuple[Position, ...]:
    recall = np.logical_or.accumulate(hits, axis=2).mean(axis=0)
    reached, first = _reached(right), hits[:, :, 0]
    counted = (reached, reached & first, reached & right, reached & right & ~first, reached & first & ~right)
    counts = np.stack([what.sum(axis=0) for what in counted], axis=1).tolist()
    return tuple(
        Position(number, tuple(of_k), *of_position)
        for number, (of_k, of_position) in enumerate(zip(recall.tolist(), counts, strict=True), 1)
    )


def calibrate(q: Floats, right: Bools) -> Calibration:
    """How far the probabilities `q` [m] are from the shares of `right` [m], in N_BINS bins of equal width."""
    at = np.minimum((q * N_BINS).astype(np.int64), N_BINS - 1)
    bins = tuple(
        Bin(
            number / N_BINS,
            (number + 1) / N_BINS,
            int(n),
            float(q[at == number].mean()),
            float(right[at == number].mean()),
        )
        for number, n in enumerate(np.bincount(at, minlength=N_BINS))
        if n
    )
    error = sum(one.n * abs(one.right - one.mean_q) for one in bins) / len(q)
    return Calibration(len(q), error, bins)
