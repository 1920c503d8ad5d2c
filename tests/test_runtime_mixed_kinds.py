"""Targets whose memory cannot be cut at will: states, interruptions and changes in the middle of a block."""

import llama_cpp
import pytest
from factories_targets import copying_drafter, make_kind
from generation import EXACT
from generation import take_greedy as take
from llama_cpp import Llama, LlamaRAMCache

from dflash2 import DFlashLlama
from dflash2.converter import convert

PROMPT = [40, 60, 70, 41, 99, 50, 61, 77]
N_TOKENS = 48
# Snapshots, two without, sliding layers that forget.
KINDS = {"qwen35": {}, "lfm2": {}, "nemotron_h": {}, "gpt-oss": {"swa_full": False}}


@pytest.fixture(scope="module", params=KINDS)
def pair(request, tmp_path_factory):
    """(DFlashLlama, what plain Llama says after PROMPT) of one kind; about half of the drafts hold."""
    folder = tmp_path_factory.mktemp(request.param)
    target, drafter = make_kind(folder / "target.gguf", request.param), folder / "drafter.gguf"
    convert(copying_drafter(folder / "checkpoint", target), target, drafter, outtype="f32")
    options = {**EXACT, **KINDS[request.param]}
    plain = Llama(str(target), **options)
    expected = take(plain, PROMPT, N_TOKENS)
    plain.close()
    llama = DFlashLlama(target, drafter, depth=None, auto_disable=False, **options)
    yield llama, expected
    assert llama.stats.accepted > 0
    llama.close()


def test_a_state_saved_within_a_block_restores(pair):
    llama, expected = pair
    for n in (1, 2, 3, 5, 6, 9):
        llama.reset()
        generator = llama.generate(PROMPT, temp=0.0)
        taken = [next(generator) for _ in range(n)]
        state = llama.save_state()
        taken += [next(generator) for _ in range(N_TOKENS - n)]
        assert taken == expected
        generator.close()
        take(llama, [99, 98, 97, 96], 5)
        llama.load_state(state)
        llama.reset_stats()
        assert take(llama, PROMPT + expected[:n], N_TOKENS - n) == expected[n:]
        assert llama.stats.prompt_tokens == 1


def test_a_new_request_amid_a_block_and_the_old_one_again(pair):
    llama, expected = pair
    for n in (1, 2, 4, 7):
        generator = llama.generate(PROMPT, temp=0.0)
        assert [next(generator) for _ in range(n)] == expected[:n]
        other = take(llama, PROMPT[::-1], 6)
        assert list(generator) == []
        assert take(llama, PROMPT, N_TOKENS) == expected
        assert take(llama, PROMPT[::-1], 6) == other


def test_an_exception_amid_a_block(pair):
    llama, expected = pair

    def interrupt(record):
        if record.position > len(PROMPT) + 10:
            raise KeyboardInterrupt

    llama.on_cycle = interrupt
    with pytest.raises(KeyboardInterrupt):
        take(llama, PROMPT, N_TOKENS)
    llama.on_cycle = None
    assert take(llama, PROMPT, N_TOKENS) == expected


def test_depth_may_change_amid_a_block(pair):
    llama, expected = pair
    generator = llama.generate(PROMPT, temp=0.0)
    taken = []
    for depth in (2, 0, 5, 1, 5):
        taken += [next(generator) for _ in range(3)]
        llama.depth = depth
    taken += [next(generator) for _ in range(N_TOKENS - 15)]
    generator.close()
    assert taken == expected


def test_the_prompt_cache_restores_both_models(pair):
    llama, _ = pair
    llama.reset()
    first = llama(PROMPT, max_tokens=20, temperature=0.0)["choices"]
    llama.set_cache(LlamaRAMCache())
    try:
        for _ in range(2):
            assert llama(PROMPT, max_tokens=20, temperature=0.0)["choices"] == first
            llama(PROMPT[::-1], max_tokens=5, temperature=0.0)
    finally:
        llama.set_cache(None)


def test_tokens_evaluated_by_someone_else_are_kept(pair):
    llama, expected = pair
    for _ in range(2):
        llama.reset()
        llama._ctx.kv_cache_clear()
        tokens = (llama_cpp.llama_token * len(PROMPT))(*PROMPT)
        batch = llama_cpp.llama_batch_get_one(tokens, len(PROMPT))
        assert llama_cpp.llama_decode(llama._ctx.ctx, batch) == 0
        llama.input_ids[: len(PROMPT)] = PROMPT
        llama.n_tokens = len(PROMPT)
        assert take(llama, [], N_TOKENS, reset=False) == expected
