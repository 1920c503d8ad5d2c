"""The stages of the cycle, each alone: arrays in, arrays out."""

import warnings

import numpy as np
import pytest

from dflash2 import native
from dflash2.native import Context, ContextOptions, Model, Outputs, Placement
from dflash2.runtime.accept import Acceptance, greedy
from dflash2.runtime.draft import draft
from dflash2.runtime.inject import inject
from dflash2.runtime.pair import read_pair
from dflash2.runtime.select import Proposal, select
from dflash2.runtime.stats import Recorder
from dflash2.runtime.verify import verify


def walk(ids, scores):
    """The selector's walk, one step at a time."""
    tokens, predecessor = [], 0
    for row_ids, row_scores in zip(ids, scores, strict=True):
        predecessor = int(np.argmax(row_scores[predecessor]))
        tokens.append(int(row_ids[predecessor]))
    return tokens


@pytest.mark.parametrize("seed", range(5))
def test_select_walks_the_lattice_from_predecessor_to_successor(seed):
    rng = np.random.default_rng(seed)
    n, k, width = 7, 16, 288
    ids = rng.choice(1000, (n, k), replace=True)
    scores = rng.normal(size=(n, k, k)).astype(np.float32)
    scores[0] = scores[0, :1]  # every predecessor of the first row is the anchor
    rows = np.zeros((n, width), np.float32)
    rows[:, :k] = ids
    rows[:, k : k + k * k] = scores.reshape(n, k * k)
    chosen = select(rows, k).tokens
    assert chosen.tolist() == walk(ids, scores)
    assert chosen.dtype == np.int32


def test_select_follows_the_path_rather_than_each_rows_best_candidate():
    rows = np.zeros((2, 2 + 4), np.float32)
    rows[0] = [10, 11, 0.0, 1.0, 0.0, 1.0]  # candidate 11
    rows[1] = [20, 21, 9.0, 0.0, 0.0, 1.0]  # 20 after 10, 21 after 11
    assert select(rows, 2).tokens.tolist() == [11, 21]


def test_select_without_selector_is_argmax():
    rows = np.random.default_rng(0).normal(size=(7, 50)).astype(np.float32)
    assert select(rows, 0).tokens.tolist() == rows.argmax(axis=1).tolist()


def test_select_of_no_rows_proposes_nothing():
    assert select(np.zeros((0, 288), np.float32), 16).tokens.tolist() == []
    assert select(np.zeros((0, 50), np.float32), 0).tokens.tolist() == []


def one_hot(tokens, vocabulary=10):
    logits = np.zeros((len(tokens), vocabulary), np.float32)
    logits[np.arange(len(tokens)), tokens] = 1.0
    return logits


@pytest.mark.parametrize(
    ("block", "chosen", "expected"),
    [
        ([3, 4, 5], [4, 5, 6], [4, 5, 6]),
        ([3, 4, 5], [4, 7, 6], [4, 7]),
        ([3, 4, 5], [9, 5, 6], [9]),
        ([3], [8], [8]),
    ],
)
def test_greedy_accepts_up_to_the_first_difference(block, chosen, expected):
    assert greedy(one_hot(chosen), block) == expected


class Scripted:
    """A request that chooses given tokens and writes down what it is asked."""

    chance = None

    def __init__(self, tokens, *, greedy):
        self.tokens, self.greedy, self.log, self.drafts = tokens, greedy, [], []

    @property
    def position(self):
        return len(self.log)

    def advance(self, token, row):
        self.log.append((token, row))

    def choose(self, draft):
        self.drafts.append(draft and draft.token)
        return self.tokens[self.log[-1][1]]


def judge(block, targets, request):
    block = np.array(block, np.int32)
    return Acceptance(block, one_hot(targets), request, Proposal(block[1:]))


def test_a_request_is_told_the_draft_of_each_row_and_of_none_after_the_last():
    request = Scripted([4, 5, 7], greedy=False)
    assert list(judge([3, 4, 5], [4, 5, 7], request)) == [4, 5, 7]
    assert request.drafts == [4, 5, None]


@pytest.mark.parametrize("is_greedy", [True, False])
def test_a_request_is_advanced_over_a_token_before_the_next_is_handed_out(is_greedy):
    request = Scripted([4, 5, 7], greedy=is_greedy)
    acceptance = judge([3, 4, 6], [4, 5, 7], request)
    seen = [(token, list(request.log)) for token in acceptance]
    assert seen == [(4, [(3, 0)]), (5, [(3, 0), (4, 1)])]
    assert acceptance.accepted == 1


def test_a_sampled_request_reads_no_row_that_the_caller_did_not_ask_for():
    request = Scripted([4, 5, 7], greedy=False)
    acceptance = iter(judge([3, 4, 5], [4, 5, 7], request))
    assert next(acceptance) == 4
    assert request.log == [(3, 0)]


def test_recorder_counts_positions_apart():
    recorder = Recorder(block_size=4)
    recorder.cycle(drafted=3, accepted=2)
    recorder.cycle(drafted=3, accepted=0)
    recorder.cycle(drafted=1, accepted=1)
    stats = recorder.snapshot()
    assert (stats.cycles, stats.drafted, stats.accepted) == (3, 7, 3)
    assert stats.accepted_at == (2, 1, 0)
    assert stats.acceptance_at == (2 / 3, 1 / 2, 0.0)
    assert stats.accepted_length == 2.0
    recorder.reset()
    assert recorder.snapshot().accepted_length == 0.0


@pytest.fixture(scope="module")
def pair(target_path, drafter_gguf):
    """A target and a drafter context without any `Llama`."""
    native.silence()
    spec = read_pair(target_path, drafter_gguf)
    options = ContextOptions(n_ctx=256, n_batch=64, n_ubatch=64, n_threads=1, n_threads_batch=1)
    models = [Model(path, Placement()) for path in (target_path, drafter_gguf)]
    target = Context.open(models[0], options)
    drafter = Context.open(models[1], options, other=target, feature_width=spec.feature_width)
    drafter.set_causal(spec.causal)
    drafter.output_lattice()
    target.tap(spec.taps)
    yield target, drafter, spec
    for owned in (drafter, target, *models):
        owned.close()


def proposals(pair, tokens, chunk):
    """What is drafted after `tokens`, injected `chunk` rows per call; None injects nothing."""
    target, drafter, spec = pair
    target.clear()
    drafter.clear()
    target.decode_tokens(tokens, 0, Outputs.LAST)
    anchor = int(target.logits()[0].argmax())
    if chunk is not None:
        buffer = np.empty((chunk, spec.feature_width), np.float32)
        inject(target, drafter, buffer, first=0, n=len(tokens), position=0)
    block = np.full(spec.block_size, spec.mask_token, np.int32)
    block[0] = anchor
    return draft(drafter, block, len(tokens), lattice=True).copy()


def test_injecting_in_small_chunks_gives_the_same_lattice(pair):
    tokens = np.arange(20, 60, dtype=np.int32)
    whole = proposals(pair, tokens, 64)
    np.testing.assert_array_equal(select(proposals(pair, tokens, 7), 16).tokens, select(whole, 16).tokens)
    assert whole.shape == (7, 288)
    assert not np.array_equal(proposals(pair, tokens, None), whole)


def test_a_lattice_holds_distinct_candidates_and_one_anchor_row(pair, n_vocab):
    lattice = proposals(pair, np.arange(30, 50, dtype=np.int32), 64)
    ids = lattice[:, :16].astype(int)
    assert all(len(set(row)) == 16 for row in ids.tolist())
    assert ids.min() >= 0
    assert ids.max() < n_vocab
    first = lattice[0, 16 : 16 + 256].reshape(16, 16)
    np.testing.assert_array_equal(first, np.broadcast_to(first[0], (16, 16)))
    assert not lattice[:, 16 + 256 :].any()


def test_verify_gives_every_row_the_logits_of_a_token_by_token_run(pair):
    target, _, _ = pair
    tokens = np.arange(40, 56, dtype=np.int32)
    target.clear()
    target.decode_tokens(tokens[:8], 0, Outputs.LAST)
    rows = verify(target, tokens[8:], 8).copy()
    target.truncate(8)
    for i, token in enumerate(tokens[8:]):
        target.decode_tokens(np.array([token], np.int32), 8 + i, Outputs.LAST)
        np.testing.assert_array_equal(target.logits()[0], rows[i])


def test_no_stage_warns_about_numbers(pair):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.isfinite(proposals(pair, np.arange(5, 25, dtype=np.int32), 64)).all()
