"""How a sampled request chooses the target's token after a row, and what that asks of the drafts.

All three ways give tokens of the target's own distribution p: softmax of what the caller's complete sampler chain
leaves of a row of logits, grammar, penalties and logits processors included.
"""

from __future__ import annotations

import secrets
import warnings
from typing import Any, Literal, Protocol, get_args

import numpy as np
import numpy.typing as npt

from dflash2.errors import Dflash2Error, SamplingError
from dflash2.native import CUSTOM, Candidates, FloatArray, IntArray, SamplerChain, TokenArray
from dflash2.runtime.noise import Noise
from dflash2.runtime.select import Chance, Draft

Verify = Literal["coupled", "rejection", "match"]

# Samplers whose effect on a row depends on nothing but the row and the tokens accepted before: p exists apart from a
# draw. The others keep random numbers or a state that moves when they are applied.
_PURE = {CUSTOM, "penalties", "dry", "grammar", "logit-bias", "infill", "temp", "temp-ext"} | {
    *("top-k", "typical", "top-p", "min-p", "top-n-sigma"),
}
_RANDOM_SEED = 0xFFFFFFFF  # llama.cpp's LLAMA_DEFAULT_SEED: a fresh seed each time
# Streams of one seed. Coupled sampling draws target and draft from the same one.
_TARGET, _DRAFT, _ACCEPT = 0, 1, 2


class Rule(Protocol):
    """A way to choose tokens."""

    @property
    def chance(self) -> Chance | None:
        """How `select` draws drafts; None for the argmax."""

    @property
    def fixes_depth(self) -> bool:
        """Whether a seed was given that promises its tokens only while each cycle verifies as many drafts."""

    def choose(self, logits: FloatArray, position: int, draft: Draft | None) -> int:
        """The token for `position`, after the row `logits` [vocabulary]; accepted by the chain.

        `draft` is what was proposed there. Raises SamplingError if no token may be chosen.
        """


class Match:
    """llama.cpp's own sampler, once per token: the text of `llama_cpp.Llama` for its seed. Drafts are argmax."""

    chance = None
    fixes_depth = False

    def __init__(self, chain: SamplerChain) -> None:
        self._chain = chain

    def choose(self, logits: FloatArray, position: int, draft: Draft | None) -> int:  # noqa: ARG002
        """As in `Rule`."""
        token = self._chain.sample(logits)
        self._chain.accept(token)
        return token


class Coupled:
    """argmax(log p + g) with noise g of (seed, position, token); drafts are drawn with the same g.

    The token depends on the row, the position and the seed alone: drafts cannot change it.
    """

    fixes_depth = False

    def __init__(self, chain: SamplerChain, seed: int, temperature: float) -> None:
        self._chain = chain
        self._noise = Noise(seed, _TARGET)
        self.chance = Chance(self._noise, temperature, coupled=True)

    def choose(self, logits: FloatArray, position: int, draft: Draft | None) -> int:  # noqa: ARG002
        """As in `Rule`."""
        ids, left = self._chain.candidates(logits)
        token = _at(ids, self._noise.draw(position, ids, left))
        self._chain.accept(token)
        return token


class Rejection:
    """Speculative sampling (Leviathan et al. 2023): accept a draft b ~ q with probability min(1, p(b) / q(b)).

    Otherwise, draw from max(p - q, 0), normalised; without a draft, from p. The three draws are independent.
    """

    def __init__(self, chain: SamplerChain, seed: int, temperature: float, *, fixes_depth: bool = True) -> None:
        self._chain = chain
        self.fixes_depth = fixes_depth
        self._noise, self._accept = Noise(seed, _TARGET), Noise(seed, _ACCEPT)
        self.chance = Chance(Noise(seed, _DRAFT), temperature, coupled=False)
        self._q = np.zeros(chain.n_vocab)

    def choose(self, logits: FloatArray, position: int, draft: Draft | None) -> int:
        """As in `Rule`."""
        candidates = self._chain.candidates(logits)
        if not candidates.logits.max() > -np.inf:
            raise _nothing_left()
        p = softmax(candidates.logits)
        token = self._judge(candidates, p, position, draft)
        self._chain.accept(token)
        return token

    def _judge(self, candidates: Candidates, p: npt.NDArray[np.float64], position: int, draft: Draft | None) -> int:
        ids = candidates.ids
        if draft is None:
            return _at(ids, self._noise.draw(position, ids, candidates.logits))
        rivals, probabilities = draft.q
        np.add.at(self._q, rivals, probabilities)  # over the vocabulary: candidates and lattice are different sets
        q_draft, q = self._q[draft.token], self._q[ids]
        self._q[rivals] = 0.0
        if self._accept.toss(position) * q_draft < p[ids == draft.token].sum():
            return draft.token
        residual = np.maximum(p - q, 0.0)
        # Of no weight only if p = q up to rounding, where a draft is refused about never.
        return self._redraw(ids, residual if residual.any() else p, position)

    def _redraw(self, ids: IntArray, weights: npt.NDArray[np.float64], position: int) -> int:
        with np.errstate(divide="ignore"):
            return _at(ids, self._noise.draw(position, ids, np.log(weights)))


def softmax(logits: FloatArray) -> npt.NDArray[np.float64]:
    """Probabilities [m] of `logits` [m], in double precision."""
    weights = np.exp(logits.astype(np.float64) - float(logits.max()))
    total: npt.NDArray[np.float64] = weights / weights.sum()
    return total


def _at(ids: IntArray, index: int) -> int:
    if index < 0:
        raise _nothing_left()
    return int(ids[index])


def _nothing_left() -> SamplingError:
    return SamplingError(
        "no token is left to choose from: a logits processor gives the whole vocabulary no probability (or the "
        "logits are not numbers); check the processor."
    )


class Sampling:
    """The choice of a rule for each request, and the buffer that all of them share.

    Attributes:
        verify: "coupled", "rejection" or "match", for requests to come.
    """

    def __init__(self, verify: Verify) -> None:
        self._tokens: TokenArray | None = None
        self._told = False
        self.verify = verify

    @property
    def verify(self) -> Verify:
        """The way that requests ask for."""
        return self._verify

    @verify.setter
    def verify(self, verify: Verify) -> None:
        if verify not in get_args(Verify):
            raise Dflash2Error(f"verify must be one of {', '.join(get_args(Verify))}, got {verify!r}.")
        self._verify: Verify = verify

    def chain(self, sampler: Any, n_vocab: int) -> SamplerChain:
        """`sampler`, a LlamaSampler of `llama_cpp`, to be run on rows of `n_vocab` logits."""
        if self._tokens is None:
            self._tokens = TokenArray(n_vocab)
        return SamplerChain(sampler, self._tokens)

    def rule(self, sampler: Any, n_vocab: int, seed: int, temperature: float) -> Rule:
        """How a request with this chain chooses tokens; warns, once per object, if it cannot be as `verify` says.

        `seed` as llama.cpp takes it: the lower 32 bits count, and 2^32 - 1 stands for a random one.
        """
        chain = self.chain(sampler, n_vocab)
        *before, last = (name for name in chain.names if not name.startswith("?"))
        stateful = [name for name in before if name not in _PURE] + [last] * (last not in ("dist", "greedy"))
        if stateful and self.verify != "match" and not self._told:
            self._told = True
            warnings.warn(
                f"verify={self.verify!r} does not apply to the sampler {stateful[0]}, which keeps random numbers or a "
                "state of its own: such requests are verified by verify='match', with llama.cpp's own random numbers.",
                RuntimeWarning,
                stacklevel=4,
            )
        if stateful or last == "greedy" or self.verify == "match":
            return Match(chain)
        temperature = temperature if temperature > 0 else 1.0
        given = seed & 0xFFFFFFFF != _RANDOM_SEED
        seed = seed & 0xFFFFFFFF if given else secrets.randbits(32)
        if self.verify == "coupled":
            return Coupled(chain, seed, temperature)
        return Rejection(chain, seed, temperature, fixes_depth=given)
