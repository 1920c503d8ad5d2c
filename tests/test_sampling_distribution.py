"""Sampled tokens are the target's: frequencies of one token and of two, against probabilities worked out in numpy.

50,000 draws per setting go through the real `select`, `Acceptance` and rules, over rows of logits and lattices that
the real pair computed, and over what llama.cpp's own chain left of them; only the decoding is not repeated, since it
would give the same rows. Rejection draws two tokens each where history matters, and everywhere with DFLASH2_FULL=1. A
last test runs thousands of real cycles.
"""

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice

import numpy as np
import pytest
from factories_sampling import CHARACTERS, END, VOCAB, make_small_pair
from llama_cpp import Llama, LlamaGrammar
from numpy_chain import Chain

from dflash2 import DFlashLlama, native
from dflash2.evidence.statistics import p_value, rejected
from dflash2.native import (
    Candidates,
    Context,
    ContextOptions,
    Model,
    Outputs,
    Placement,
    SamplerChain,
    TokenArray,
)
from dflash2.runtime.accept import Acceptance
from dflash2.runtime.draft import draft
from dflash2.runtime.inject import inject
from dflash2.runtime.noise import Noise
from dflash2.runtime.pair import read_pair
from dflash2.runtime.sampling import Coupled, Rejection
from dflash2.runtime.select import select

N_DRAWS = 50_000
PROMPT = np.array([5, 9, 30, 17, 41, 8], np.int32)
ANCHOR = 20
TOP_K = 7
SEED = 2026
FULL = bool(os.environ.get("DFLASH2_FULL"))
JOINT = ("penalties", "grammar")
GRAMMAR = "root ::= ([A-M] | [0-9] [N-Z])+"


def allowed_by_grammar(so_far):
    """After a digit only N-Z; otherwise a letter A-M or a digit, or the end if anything is there."""
    text = "".join(CHARACTERS[token - 2] for token in so_far)
    permitted = "NOPQRSTUVWXYZ" if text[-1:].isdigit() else "ABCDEFGHIJKLM0123456789"
    mask = np.array([False, False, *(character in permitted for character in CHARACTERS)])
    mask[END] = bool(text) and not text[-1].isdigit()
    return mask


CHAINS = {
    "T 0.3": Chain(temp=0.3),
    "T 0.7": Chain(temp=0.7),
    "T 1.0": Chain(temp=1.0),
    "T 1.5": Chain(temp=1.5),
    "top-k": Chain(temp=1.2, top_k=9),
    "top-p": Chain(temp=0.8, top_p=0.6),
    "min-p": Chain(temp=1.0, min_p=0.2),
    "penalties": Chain(temp=1.0, repeat_penalty=1.5, frequency_penalty=0.9, presence_penalty=0.6),
    "grammar": Chain(temp=1.0, allowed=allowed_by_grammar),
}


@dataclass(frozen=True)
class Rows:
    """What the models computed for the prompt and the anchor.

    Attributes:
        first: logits after the anchor, [vocabulary].
        second: `second[a]` those after the anchor and a, [vocabulary, vocabulary].
        block: lattice of the block behind the anchor, [3, hidden]; `later[a]` the first row of the one behind a.
    """

    first: np.ndarray
    second: np.ndarray
    block: np.ndarray
    later: np.ndarray


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return make_small_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def rows(pair) -> Iterator[Rows]:
    native.silence()
    spec = read_pair(*pair)
    options = ContextOptions(n_ctx=256, n_batch=64, n_ubatch=64, n_threads=1, n_threads_batch=1)
    models = [Model(path, Placement()) for path in pair]
    target = Context.open(models[0], options)
    drafter = Context.open(models[1], options, other=target, feature_width=spec.feature_width)
    drafter.set_causal(spec.causal)
    drafter.output_lattice()
    target.tap(spec.taps)
    buffer = np.empty((16, spec.feature_width), np.float32)
    n = len(PROMPT)
    target.decode_tokens(PROMPT, 0, Outputs.LAST)
    inject(target, drafter, buffer, first=0, n=n, position=0)
    noise = np.full(spec.block_size, spec.mask_token, np.int32)
    noise[0] = ANCHOR
    block = draft(drafter, noise, n, lattice=True).copy()
    drafter.truncate(n)
    second, later = [], []
    for token in range(VOCAB):
        target.decode_tokens(np.array([ANCHOR, token], np.int32), n, Outputs.ALL)
        first, after = target.logits().copy()
        second.append(after)
        inject(target, drafter, buffer, first=0, n=1, position=n)
        noise[0] = token
        later.append(draft(drafter, noise, n + 1, lattice=True)[:1].copy())
        drafter.truncate(n)
        target.truncate(n)
    yield Rows(first, np.array(second), block, np.array(later))
    for owned in (drafter, target, *models):
        owned.close()


@pytest.fixture(scope="module")
def llama(pair):
    """Plain: it makes the sampler chains."""
    plain = Llama(str(pair[0]), n_ctx=256, verbose=False)
    yield plain
    plain.close()


def sampling_arguments(chain):
    arguments = asdict(chain)
    if arguments.pop("allowed") is not None:
        arguments["grammar"] = LlamaGrammar.from_string(GRAMMAR, verbose=False)
    return arguments


class RecordedChain:
    """What llama.cpp's chain left of each row, by the tokens accepted before it."""

    n_vocab = VOCAB

    def __init__(self, llama, arguments, rows):
        self._left, self._so_far = {}, ()
        tokens = TokenArray(VOCAB)
        self._record(SamplerChain(llama._init_sampler(**arguments), tokens), (), rows.first)
        for token in self._left[()].ids[self._left[()].logits > -np.inf].tolist():
            chain = SamplerChain(llama._init_sampler(**arguments), tokens)
            chain.candidates(rows.first)
            chain.accept(token)
            self._record(chain, (token,), rows.second[token])

    def _record(self, chain, so_far, logits):
        ids, left = chain.candidates(logits)
        self._left[so_far] = Candidates(ids.copy(), left.copy())

    def left(self, *so_far):
        return self._left[so_far]

    def drawn(self, so_far, noise, positions):
        """Tokens drawn with `noise` at all `positions`."""
        ids, left = self._left[so_far]
        return ids[(left + noise.gumbel(positions, np.broadcast_to(ids, (len(positions), len(ids))))).argmax(axis=1)]

    def restart(self):
        self._so_far = ()

    def candidates(self, logits):  # noqa: ARG002
        return self._left[self._so_far]

    def accept(self, token):
        self._so_far = (*self._so_far, token)


class RecordedRequest:
    """A request that reads recorded rows; every draw stands at two positions of its own."""

    greedy = False

    def __init__(self, rule, chain):
        self.rule, self.chance, self._chain = rule, rule.chance, chain
        self.position = 0

    def start(self, position):
        self.position = position
        self._chain.restart()

    def advance(self, token, row):  # noqa: ARG002
        self.position += 1

    def choose(self, proposed):
        return self.rule.choose(None, self.position, proposed)


class TabledNoise(Noise):
    """The same noise, worked out for all positions and tokens at once: a draw then takes a tenth of the time."""

    @classmethod
    def of(cls, noise, n_positions):
        tabled = cls(noise.seed, noise.stream)
        ids = np.broadcast_to(np.arange(VOCAB, dtype=np.int32), (n_positions, VOCAB))
        object.__setattr__(tabled, "_table", noise.gumbel(np.arange(n_positions), ids))
        return tabled

    def gumbel(self, position, ids):
        return self._table[position if isinstance(position, int) else position[:, None], ids]


def draws(make_rule, llama, chain, rows, n_tokens, n_draws=N_DRAWS):
    """Counts [vocabulary] * n_tokens of the tokens behind the anchor, and how many drafts were accepted."""
    recorded = RecordedChain(llama, sampling_arguments(chain), rows)
    rule = make_rule(recorded, SEED, chain.temp)
    n_positions = 2 * n_draws + 4
    rule._noise = TabledNoise.of(rule._noise, n_positions)
    rule.chance = replace(rule.chance, noise=TabledNoise.of(rule.chance.noise, n_positions))
    request = RecordedRequest(rule, recorded)
    # Rows 0 and 1 of the block over and over: each has its own position, and row 0 reads no predecessor.
    proposals = select(np.tile(rows.block[:2], (n_draws, 1)), TOP_K, 1, request.chance)
    counts = np.zeros((VOCAB,) * n_tokens, np.int64)
    accepted = 0
    for i in range(n_draws):
        request.start(2 * i)
        acceptance = judge(request, ANCHOR, proposals.part(slice(2 * i, 2 * i + n_tokens)))
        tokens = list(islice(acceptance, n_tokens))
        accepted += acceptance.accepted
        if len(tokens) < n_tokens:  # the next cycle's block stands behind the first token
            proposal = select(rows.later[tokens[0]], TOP_K, request.position + 1, request.chance)
            acceptance = judge(request, tokens[0], proposal)
            tokens.append(next(iter(acceptance)))
            accepted += acceptance.accepted
        counts[tuple(tokens)] += 1
    return counts, accepted / (n_draws * n_tokens)


def judge(request, anchor, proposal):
    return Acceptance(np.array([anchor, *proposal.tokens], np.int32), None, request, proposal)


def exact_pairs(chain, rows):
    """Probabilities [vocabulary, vocabulary] of the two tokens behind the anchor."""
    first = chain.probabilities(rows.first, ())
    return np.array(
        [
            first[token] * chain.probabilities(rows.second[token], (token,)) if first[token] else np.zeros(VOCAB)
            for token in range(VOCAB)
        ]
    )


def coupled_draws(llama, chain, rows):
    """As `draws` of two tokens by Coupled, all at once: there the token depends on the row and the position alone."""
    recorded = RecordedChain(llama, sampling_arguments(chain), rows)
    noise = TabledNoise.of(Coupled(recorded, SEED, chain.temp)._noise, 2 * N_DRAWS + 4)
    positions = 2 * np.arange(N_DRAWS) + 1
    first = recorded.drawn((), noise, positions)
    counts = np.zeros((VOCAB, VOCAB), np.int64)
    for token in np.unique(first).tolist():
        second = recorded.drawn((token,), noise, positions[first == token] + 1)
        counts[token] = np.bincount(second, minlength=VOCAB)
    return counts


def p_values(counts, exact):
    """Of the first token alone and, where `counts` tells them, of both together."""
    if counts.ndim == 1:
        return {"next": p_value(counts, exact.sum(axis=1))}
    return {"next": p_value(counts.sum(axis=1), exact.sum(axis=1)), "joint": p_value(counts, exact)}


def test_frequencies_of_rejection_are_those_of_the_target(llama, rows):
    found = {}
    for name, chain in CHAINS.items():
        counts, acceptance = draws(Rejection, llama, chain, rows, 2 if FULL or name in JOINT else 1)
        assert 0.01 < acceptance < 0.9, f"{name}: both paths must be taken"
        found |= {(name, kind): p for kind, p in p_values(counts, exact_pairs(chain, rows)).items()}
    assert rejected(found) == []


def test_frequencies_of_coupled_are_those_of_the_target(llama, rows):
    found = {
        (name, kind): p
        for name, chain in CHAINS.items()
        for kind, p in p_values(coupled_draws(llama, chain, rows), exact_pairs(chain, rows)).items()
    }
    assert rejected(found) == []


@pytest.mark.parametrize("name", CHAINS)
def test_coupled_draws_behind_drafts_are_those_without(llama, rows, name):
    """So what holds for the draws above, made all at once, holds for those of cycles."""
    few = 1_000
    counts, acceptance = draws(Coupled, llama, CHAINS[name], rows, 2, few)
    recorded = RecordedChain(llama, sampling_arguments(CHAINS[name]), rows)
    noise = Noise(SEED)
    expected = np.zeros_like(counts)
    for position in range(1, 2 * few, 2):
        ids, left = recorded.left()
        first = int(ids[noise.draw(position, ids, left)])
        ids, left = recorded.left(first)
        expected[first, ids[noise.draw(position + 1, ids, left)]] += 1
    np.testing.assert_array_equal(counts, expected)
    assert 0.01 < acceptance < 0.95


class NotRenormalised(Rejection):
    """Draws from max(p - q, 0) by its running sum, as if that ended at 1; what is missing falls on the last token."""

    def _redraw(self, ids, weights, position):
        at = np.searchsorted(np.cumsum(weights), self._accept.toss(position + 2 * N_DRAWS))
        return int(ids[min(at, len(ids) - 1)])


class SharedNoise(Rejection):
    """Draws the residual with the noise that the draft was drawn with."""

    def _redraw(self, ids, weights, position):
        self._noise = self.chance.noise
        return super()._redraw(ids, weights, position)


class SharedToss(Rejection):
    """Accepts by the noise that the draft was drawn with."""

    def choose(self, logits, position, draft):
        noise = Noise(self.chance.noise.seed, self.chance.noise.stream)
        self._accept = Toss(noise.uniform(position, np.array([draft.token if draft else 0]))[0])
        return super().choose(logits, position, draft)


class Toss:
    def __init__(self, value):
        self.toss = lambda position: value  # noqa: ARG005


class StandingNoise(Coupled):
    """Draws every second token with the noise of the one before."""

    def choose(self, logits, position, draft):
        return super().choose(logits, position - (position + 1) % 2, draft)


@pytest.mark.parametrize(
    ("broken", "name"),
    [(NotRenormalised, "T 1.0"), (SharedNoise, "T 0.3"), (SharedToss, "T 1.0"), (StandingNoise, "T 1.0")],
)
def test_a_broken_verifier_is_caught(llama, rows, broken, name):
    chain = CHAINS[name]
    counts, _ = draws(broken, llama, chain, rows, 2, 10_000)
    assert rejected(p_values(counts, exact_pairs(chain, rows)))


@pytest.mark.parametrize("verify", ["coupled", "rejection"])
def test_real_cycles_give_the_target_s_frequencies(pair, verify):
    """Two tokens of which the second was drafted, 2,000 requests with a seed each."""
    chain, n = Chain(temp=1.0, top_k=4), 2_000
    llm = DFlashLlama(
        *pair, n_ctx=256, n_threads=1, n_threads_batch=1, verify=verify, depth=None, auto_disable=False, verbose=False
    )
    prompt = PROMPT.tolist()
    counts = np.zeros((VOCAB, VOCAB), np.int64)
    for seed in range(1, n + 1):
        llm.set_seed(seed)
        generator = llm.generate(prompt, **sampling_arguments(chain))
        counts[next(generator), next(generator)] += 1
        generator.close()
    stats = llm.stats
    first, *second = logits_after(llm, prompt)
    llm.close()
    p_first = chain.probabilities(first, ())
    exact = np.array([p_first[a] * chain.probabilities(second[a], (a,)) for a in range(VOCAB)])
    assert stats.cycles == n
    assert stats.accepted > 0.01 * n
    assert rejected({"first": p_value(counts.sum(axis=1), p_first), "both": p_value(counts, exact)}) == []


def logits_after(llm, prompt):
    """Rows behind `prompt`, and behind it and each token of the vocabulary."""
    llm.reset()
    llm.eval(prompt)
    yield llm._session.target.logits()[-1].copy()
    for token in range(VOCAB):
        llm.n_tokens = len(prompt)
        llm.eval([token])
        yield llm._session.target.logits()[-1].copy()
