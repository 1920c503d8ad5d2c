"""Lattices to look at: what the drafter offered in a cycle, what it chose, and what the target wanted, in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dflash2.evidence.engines import Engine
from dflash2.native import IntArray
from dflash2.runtime import Lattice


@dataclass(frozen=True)
class Offered:
    """A candidate: `token`, its `text`, the drafter's `logit`, and the probability `q` behind the path so far."""

    token: int
    text: str
    logit: float
    q: float


@dataclass(frozen=True)
class LatticePosition:
    """One drafted position: the token of the path, the one the target wants, and the candidates, likeliest first."""

    path: int
    wanted: int
    wanted_text: str
    candidates: tuple[Offered, ...]


@dataclass(frozen=True)
class CycleLattice:
    """One cycle.

    Attributes:
        prompt: its id.
        token: where the anchor stands in the generated text, 0 for the first token.
        anchor: its text.
        accepted: drafted tokens that the target wants, up to the first that it does not.
        positions: what stands behind the anchor, position 1 first.
    """

    prompt: str
    token: int
    anchor: str
    accepted: int
    positions: tuple[LatticePosition, ...]


def cycle_lattice(engine: Engine, prompt: str, text: Sequence[int], first: int, lattice: Lattice) -> CycleLattice:
    """The `lattice` behind text[first], where `text` is what the target generated for `prompt`."""
    wanted = text[first + 1 : first + 1 + len(lattice.tokens)]
    right = [token == want for token, want in zip(lattice.tokens.tolist(), wanted, strict=True)]
    return CycleLattice(
        prompt=prompt,
        token=first,
        anchor=engine.text_of([text[first]]),
        accepted=(*right, False).index(False),
        positions=tuple(
            LatticePosition(token, want, engine.text_of([want]), _offered(engine, lattice, row))
            for row, (token, want) in enumerate(zip(lattice.tokens.tolist(), wanted, strict=True))
        ),
    )


def _offered(engine: Engine, lattice: Lattice, row: int) -> tuple[Offered, ...]:
    ids: IntArray = lattice.ids[row]
    columns = (ids.tolist(), lattice.logits[row].tolist(), lattice.chances[row].tolist())
    return tuple(Offered(token, engine.text_of([token]), logit, q) for token, logit, q in zip(*columns, strict=True))
