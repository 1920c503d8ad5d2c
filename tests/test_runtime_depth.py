"""Depths chosen while generating leave the text as it is, and what was not injected at once is injected in time."""

import warnings

import pytest

from dflash2 import DFlashLlama
from dflash2.errors import Dflash2Error
from dflash2.runtime.depth import PLAIN, Step

EXACT = {"n_ctx": 512, "n_batch": 64, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
N_TOKENS = 150


@pytest.fixture(scope="module")
def opened(target_path, drafter_gguf):
    llm = DFlashLlama(target_path, drafter_gguf, auto_disable=False, **EXACT)
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def tokens_of(opened, prompts):
    return [opened.tokenize(text.encode()) for text in prompts[:3]]


def take(llm, prompt, n, **kwargs):
    llm.reset()
    stream = llm.generate(prompt, **{"temp": 0.0, **kwargs})
    tokens = [token for _, token in zip(range(n), stream, strict=False)]
    stream.close()
    return tokens


class Script:
    """Chooses the depths it is told to, over and over; `cold` of each round's plain steps leave the drafter behind."""

    def __init__(self, depths, cold=False):
        self.depths, self.at, self.cold, self.ready = depths, 0, cold, True

    def plan(self):
        depth = self.depths[self.at % len(self.depths)]
        self.at += 1
        self.ready = not self.cold or depth > 0 or self.at % 20 > 10
        return Step(depth, depth + 1) if depth else PLAIN

    def observe(self, *_):
        pass

    def most(self):
        return Step(7, 8)

    def coast(self):
        return 0

    def offer_prompt(self):
        return self.ready

    def saw_prompt(self, tokens):
        pass


SCRIPTS = {
    "one by one": [1, 2, 3, 4, 5, 6, 7],
    "with plain tokens": [7, 0, 0, 3, 0, 5],
    "more plain tokens than are injected together": [*[0] * 70, 7, 7, 7, 3],
}


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("chain", [{}, {"temp": 0.8, "top_k": 20}], ids=["greedy", "coupled"])
def test_the_text_does_not_depend_on_the_depths(opened, tokens_of, name, chain):
    opened.depth = 0
    expected = []
    for prompt in tokens_of:
        opened.set_seed(7)
        expected.append(take(opened, prompt, N_TOKENS, **chain))
    opened.depth = "auto"
    opened._session.planner._controller = Script(SCRIPTS[name])
    opened.reset_stats()
    for prompt, text in zip(tokens_of, expected, strict=True):
        opened.set_seed(7)
        assert take(opened, prompt, N_TOKENS, **chain) == text
    assert opened.stats.at_depth[7] > 0
    opened.depth = 0


def test_proposals_behind_plain_tokens_are_those_of_a_drafter_never_left_out(opened, tokens_of):
    """What plain tokens left is injected before the next draft: at one position it proposes the same."""
    proposals = {}
    for name, depths in (("always", [7]), ("late", [*[0] * 70, *[7] * 30])):
        opened.depth = "auto"
        opened._session.planner._controller = Script(depths)
        seen = proposals[name] = {}
        opened.on_cycle = lambda cycle, seen=seen: seen.__setitem__(cycle.position, cycle.proposal)
        take(opened, tokens_of[0], N_TOKENS)
    opened.on_cycle = None
    shared = proposals["always"].keys() & proposals["late"].keys()
    assert len(shared) >= 3
    assert all(proposals["always"][at] == proposals["late"][at] for at in shared)
    opened.depth = 0


def test_a_drafter_left_behind_starts_anew(opened, tokens_of):
    opened.depth = 0
    expected = take(opened, tokens_of[1], N_TOKENS)
    opened.depth = "auto"
    opened._session.planner._controller = Script([*[0] * 17, 7, 7, 7], cold=True)
    opened.reset_stats()
    assert take(opened, tokens_of[1], N_TOKENS) == expected
    assert opened.stats.cycles > 5
    opened.depth = 0


def test_auto_is_the_default_and_none_the_largest_depth(target_path, drafter_gguf, opened):
    llm = DFlashLlama(target_path, drafter_gguf, depth=None, **EXACT)
    assert llm.depth == 7
    llm.depth = "auto"
    assert llm.depth == "auto"
    llm.close()
    assert DFlashLlama.__init__.__kwdefaults__["depth"] == "auto"
    with pytest.raises(Dflash2Error, match='"auto" or a whole number'):
        opened.depth = "most"


def test_a_seed_with_rejection_always_has_the_same_depth(opened, tokens_of):
    opened.depth, opened.verify = "auto", "rejection"
    opened._session.planner._controller = Script([0, 3])
    opened.reset_stats()
    opened.set_seed(3)
    first = take(opened, tokens_of[0], 60, temp=0.8)
    assert opened.stats.at_depth[3] == opened.stats.at_depth[0] == 0
    opened.set_seed(3)
    assert take(opened, tokens_of[0], 60, temp=0.8) == first
    opened.depth, opened.verify = 0, "coupled"


def test_a_shortened_block_gives_the_same_text(target_path, drafter_gguf, opened, tokens_of):
    opened.depth = 0
    expected = take(opened, tokens_of[0], N_TOKENS)
    llm = DFlashLlama(target_path, drafter_gguf, depth=3, draft_block=4, auto_disable=False, **EXACT)
    assert take(llm, tokens_of[0], N_TOKENS) == expected
    assert llm.stats.accepted > 0
    llm.close()
    with pytest.raises(Dflash2Error, match=r"2\.\.8"):
        DFlashLlama(target_path, drafter_gguf, draft_block=9, **EXACT)


def slow_at_many_rows(llm):
    """Time in which the target takes a second per row, whatever this machine does."""
    now = [0.0]
    decode = llm._session.target._decode

    def counted(pointer, batch):
        now[0] += batch.n_tokens
        return decode(pointer, batch)

    llm._session.target._decode = counted
    llm._session.recorder.clock = lambda: now[0]


def test_a_fixed_depth_slower_than_plain_tokens_warns_and_ends(target_path, drafter_gguf, tokens_of):
    llm = DFlashLlama(target_path, drafter_gguf, depth=7, **EXACT)
    slow_at_many_rows(llm)
    with pytest.warns(RuntimeWarning, match=r"a cycle takes 8000\.00 ms .* without drafting 1000\.00 ms"):
        take(llm, tokens_of[0], 250)
    assert llm.stats.cycles == 32
    assert not llm._session.planner.drafting
    llm.close()


def test_auto_ends_drafting_without_a_word_where_plain_tokens_are_faster(target_path, drafter_gguf, tokens_of):
    llm = DFlashLlama(target_path, drafter_gguf, **EXACT)
    slow_at_many_rows(llm)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        take(llm, tokens_of[0], 300)
    assert llm.stats.at_depth[0] > 200
    assert llm.stats.cycles < 20
    llm.close()
