"""Lattice: what the drafter offers behind given tokens, for measurements; `cycle` has its own way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dflash2.native import FloatArray, IntArray, Outputs
from dflash2.runtime.select import best_path
from dflash2.runtime.session import Session


@dataclass(frozen=True)
class Lattice:
    """One draft pass behind an anchor: n = block size - 1 drafted positions, K candidates of each.

    Attributes:
        position: where the anchor stands.
        tokens: the path [n], proposed to a greedy request.
        ids: the candidates [n, K], the likeliest by the drafter's logits first.
        logits: the drafter's logits of them [n, K], which the selector's pair scores are not part of.
        chances: the probability [n, K] of each candidate behind the path so far: softmax(S), T = 1.
        q: that [n] of each token of the path.
    """

    position: int
    tokens: IntArray
    ids: IntArray
    logits: FloatArray
    chances: npt.NDArray[np.float64]
    q: npt.NDArray[np.float64]


def lattices(session: Session, tokens: IntArray, anchors: Sequence[int]) -> Iterator[Lattice]:
    """The drafter's lattice behind tokens[: anchor + 1] for each of the ascending `anchors`, from empty memories.

    The target processes what stands before an anchor, and it is injected. Raises NativeError.
    """
    spec = session.spec
    block = np.full(spec.block_size, spec.mask_token, np.int32)
    reached = 0
    for anchor in anchors:
        for _ in session.evaluate(tokens[reached:anchor], reached):
            pass
        reached = anchor
        block[0] = tokens[anchor]
        session.drafter.decode_tokens(block, anchor, Outputs.ALL)
        lattice = _lattice(session, anchor)
        session.injection.cut(anchor)
        yield lattice


def _lattice(session: Session, anchor: int) -> Lattice:
    """A copy of what the drafter's last pass found."""
    logits, top_k = session.drafter.logits()[1:], session.spec.top_k
    path = best_path(session.drafter.lattice()[1:] if top_k else logits, top_k)
    assert path.ids is not None
    of_candidates = np.take_along_axis(logits, path.ids, axis=1)
    order = np.argsort(-of_candidates, axis=1, kind="stable")
    chances = np.stack([path.draft(row).q[1] for row in range(len(path.tokens))])
    return Lattice(
        position=anchor,
        tokens=path.tokens,
        ids=np.take_along_axis(path.ids, order, axis=1),
        logits=np.take_along_axis(of_candidates, order, axis=1),
        chances=np.take_along_axis(chances, order, axis=1),
        q=np.array([row[ids == token][0] for row, ids, token in zip(chances, path.ids, path.tokens, strict=True)]),
    )
