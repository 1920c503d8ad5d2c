"""DFlashLlama against plain llama_cpp.Llama on the same target: not one token may differ."""

import ast
import inspect
import pickle
from pathlib import Path

import pytest
from generation import EXACT
from generation import take_greedy as take
from llama_cpp import Llama, LlamaGrammar, LlamaRAMCache, StoppingCriteriaList

import dflash2.runtime
from dflash2 import Dflash2Error, DFlashLlama
from dflash2.errors import ContextLimitError, NativeError

GREEDY = {"temp": 0.0}


@pytest.fixture(scope="module")
def plain(target_path):
    llama = Llama(str(target_path), **EXACT)
    yield llama
    llama.close()


@pytest.fixture(scope="module", params=["v2", "v1"])
def drafted(request, target_path, drafter_gguf, drafter_v1_gguf):
    drafter = {"v2": drafter_gguf, "v1": drafter_v1_gguf}[request.param]
    llama = DFlashLlama(target_path, drafter, depth=None, auto_disable=False, **EXACT)
    yield llama
    llama.close()


@pytest.fixture(scope="module")
def tokens_of(plain, prompts):
    return [plain.tokenize(prompt.encode()) for prompt in prompts]


@pytest.mark.parametrize("prompt", range(20))
def test_greedy_tokens_equal_those_of_plain_llama(plain, drafted, tokens_of, prompt):
    for llama in (plain, drafted):
        llama.reset()
    expected = take(plain, tokens_of[prompt], 200)
    drafted.reset_stats()
    assert take(drafted, tokens_of[prompt], 200) == expected
    assert drafted.stats.cycles >= 200 / 8


@pytest.mark.parametrize("depth", range(8))
def test_every_depth_gives_the_same_tokens(plain, drafted, tokens_of, depth):
    drafted.depth = depth
    drafted.reset_stats()
    try:
        assert take(drafted, tokens_of[0], 64) == take(plain, tokens_of[0], 64)
    finally:
        drafted.depth = 7
    assert (drafted.stats.cycles == 0) == (depth == 0)
    assert not any(drafted.stats.drafted_at[depth:])


def test_second_and_third_request_equal_plain_and_reuse_the_prefix(plain, drafted, tokens_of):
    first = tokens_of[1]
    answer = take(plain, first, 40)
    second = first + answer[:21] + tokens_of[2][:5]
    third = first[:10] + tokens_of[3]
    assert take(drafted, first, 40) == answer
    drafted.reset_stats()
    assert take(drafted, second, 40) == take(plain, second, 40)
    assert drafted.stats.prompt_tokens == 5
    assert take(drafted, third, 40) == take(plain, third, 40)


def test_the_same_prompt_again_gives_the_same_tokens(drafted, tokens_of):
    assert take(drafted, tokens_of[4], 33) == take(drafted, tokens_of[4], 33)


def test_a_prompt_longer_than_the_batch(target_path, fresh, tokens_of):
    prompt = (tokens_of[0] + tokens_of[1] + tokens_of[2] + tokens_of[3])[:150]
    plain = Llama(str(target_path), n_batch=32, **EXACT)
    assert take(fresh(n_batch=32), prompt, 64) == take(plain, prompt, 64)
    plain.close()


def test_closing_anywhere_in_a_block_leaves_the_object_ready(plain, drafted, tokens_of):
    whole = take(plain, tokens_of[5], 30)
    for n in (1, 2, 3, 5, 7, 8, 9, 11, 30):
        assert take(drafted, tokens_of[5], n) == whole[:n]
        continued = tokens_of[5] + whole[:n]
        assert take(drafted, continued, 30 - n) == whole[n:]


def test_an_abandoned_generator_does_not_disturb_the_next_request(plain, drafted, tokens_of):
    abandoned = drafted.generate(tokens_of[6], **GREEDY)
    next(abandoned)
    next(abandoned)
    abandoned.close()
    assert take(drafted, tokens_of[7], 40) == take(plain, tokens_of[7], 40)


def test_the_context_limit_inside_a_block(target_path, fresh, tokens_of):
    small = Llama(str(target_path), **{**EXACT, "n_ctx": 256})
    expected = []
    with pytest.raises(RuntimeError):
        expected.extend(small.generate(tokens_of[8], **GREEDY))
    got = []
    llama = fresh(n_ctx=256)
    with pytest.raises(ContextLimitError, match="256"):
        for token in llama.generate(tokens_of[8], **GREEDY):
            got.append(token)
    assert len(got) == 256 - len(tokens_of[8]) + 1
    assert got[: len(expected)] == expected
    assert take(llama, tokens_of[9], 20) == take(small, tokens_of[9], 20)
    small.close()


def test_a_prompt_that_does_not_fit_is_refused(fresh, tokens_of):
    llama = fresh(n_ctx=256)
    with pytest.raises(ContextLimitError, match="n_ctx"):
        next(llama.generate(tokens_of[1] * 12, **GREEDY))
    assert len(take(llama, tokens_of[1], 5)) == 5


def test_completion_and_streaming_give_the_same_text(plain, drafted, prompts):
    arguments = {"max_tokens": 45, "temperature": 0.0}
    expected = plain(prompts[3], **arguments)["choices"][0]
    got = drafted(prompts[3], **arguments)["choices"][0]
    streamed = "".join(chunk["choices"][0]["text"] for chunk in drafted(prompts[3], stream=True, **arguments))
    assert got == expected
    assert streamed == expected["text"]


def test_a_stop_string_inside_a_block(plain, drafted, prompts):
    text = plain(prompts[2], max_tokens=40, temperature=0.0)["choices"][0]["text"]
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    arguments = {"max_tokens": 40, "temperature": 0.0, "stop": [stop]}
    assert drafted(prompts[2], **arguments)["choices"][0] == plain(prompts[2], **arguments)["choices"][0]


def test_chat_completion_equals_plain(plain, drafted):
    messages = [{"role": "user", "content": "def add(a, b):"}]
    arguments = {"max_tokens": 24, "temperature": 0.0}
    expected = plain.create_chat_completion(messages, **arguments)["choices"]
    assert drafted.create_chat_completion(messages, **arguments)["choices"] == expected
    pieces = [
        c["choices"][0]["delta"].get("content", "")
        for c in drafted.create_chat_completion(messages, stream=True, **arguments)
    ]
    assert "".join(pieces) == expected[0]["message"]["content"]


SAMPLERS = {
    "default": {},
    "hot": {"temp": 1.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    "one candidate": {"top_k": 1},
    "penalties": {"temp": 0.7, "repeat_penalty": 1.3, "frequency_penalty": 0.2, "presence_penalty": 0.1},
    "greedy with penalties": {"temp": 0.0, "repeat_penalty": 1.3},
    "mirostat": {"mirostat_mode": 2},
}


@pytest.fixture
def matched(drafted):
    """The drafted object, walking llama.cpp's own sampler."""
    drafted.verify = "match"
    yield drafted
    drafted.verify = "coupled"


@pytest.mark.parametrize("sampling", SAMPLERS.values(), ids=SAMPLERS)
def test_matched_to_llama_cpps_sampler_a_seed_gives_the_text_of_plain_llama(plain, matched, tokens_of, sampling):
    for llama in (plain, matched):
        llama.set_seed(1234)
    sampling = {"temp": 0.8, **sampling}
    assert take(matched, tokens_of[10], 80, **sampling) == take(plain, tokens_of[10], 80, **sampling)


def test_grammar_and_logit_bias_hold_under_drafting(plain, drafted, prompts):
    grammar = LlamaGrammar.from_string('root ::= ("self" | "return" | " " | "\\n")+', verbose=False)
    arguments = {"max_tokens": 30, "temperature": 0.0, "grammar": grammar, "logit_bias": {"10": -2.0}}
    expected = plain(prompts[0], **arguments)["choices"][0]["text"]
    assert drafted(prompts[0], **arguments)["choices"][0]["text"] == expected
    assert set(expected) <= set("selfreturn \n")


def test_logprobs_equal_plain(target_path, fresh, prompts):
    plain = Llama(str(target_path), logits_all=True, **EXACT)
    arguments = {"max_tokens": 20, "temperature": 0.0, "logprobs": 3}
    expected = plain(prompts[1], **arguments)["choices"][0]
    assert fresh(logits_all=True)(prompts[1], **arguments)["choices"][0] == expected
    plain.close()


def test_stopping_criteria_see_every_token_as_in_plain(plain, drafted, tokens_of):
    def lengths(llama):
        seen = []

        def stop(input_ids, logits):
            seen.append((len(input_ids), int(input_ids[-1]), logits.shape[-1]))
            return len(seen) == 21

        list(llama.generate(tokens_of[2], stopping_criteria=StoppingCriteriaList([stop]), **GREEDY))
        return seen

    assert lengths(drafted) == lengths(plain)


def test_tokens_sent_into_the_generator_follow_the_last_one(plain, drafted, tokens_of):
    """Plain llama_cpp dies here without logits_all; what is meant is a prompt that goes on with those tokens."""
    sent = tokens_of[12][:4]
    generator = drafted.generate(tokens_of[11], **GREEDY)
    first = [next(generator) for _ in range(6)]
    second = [generator.send(sent)] + [next(generator) for _ in range(20)]
    generator.close()
    assert first == take(plain, tokens_of[11], 6)
    assert second == take(plain, tokens_of[11] + first + sent, 21)


def test_low_level_eval_and_sample_after_a_closed_block(plain, drafted, tokens_of):
    def run(llama):
        take(llama, tokens_of[13], 4)
        a = llama.sample(temp=0.0)
        llama.eval([a, 5, 6])
        return a, llama.sample(temp=0.0), llama.n_tokens

    assert run(drafted) == run(plain)


def proposals(llama, tokens, n=30):
    """Everything drafted while `n` tokens are generated, cycle by cycle."""
    records = []
    llama.on_cycle = records.append
    take(llama, tokens, n)
    llama.on_cycle = None
    return records


def test_a_saved_state_restores_text_and_proposals(fresh, tokens_of):
    llama, other = fresh(), fresh()
    take(llama, tokens_of[14], 33)
    state = llama.save_state()
    more = [*llama.input_ids[: llama.n_tokens].tolist(), 5, 6, 7]
    expected = proposals(llama, more)
    take(llama, tokens_of[15], 25)
    for restored in (llama, other):
        restored.load_state(state)
        restored.reset_stats()
        assert proposals(restored, more) == expected
        assert restored.stats.prompt_tokens == 3


def test_a_plain_state_restores_the_text(plain, fresh, tokens_of):
    expected = take(plain, tokens_of[14], 25)
    llama = fresh()
    llama.load_state(plain.save_state())
    assert take(llama, tokens_of[14], 25) == expected


def test_the_prompt_cache_gives_the_same_text(fresh, prompts):
    llama = fresh()
    arguments = {"max_tokens": 20, "temperature": 0.0}
    expected = [llama(prompt, **arguments)["choices"] for prompt in prompts[:2]]
    llama.set_cache(LlamaRAMCache())
    for _ in range(2):
        assert [llama(prompt, **arguments)["choices"] for prompt in prompts[:2]] == expected


def test_stats_add_up(drafted, tokens_of):
    drafted.reset_stats()
    records = []
    drafted.on_cycle = records.append
    took = take(drafted, tokens_of[16], 101)
    drafted.on_cycle = None
    stats = drafted.stats
    assert stats.emitted == len(took) == 101
    assert stats.cycles == len(records)
    assert stats.accepted == sum(record.accepted for record in records) == sum(stats.accepted_at)
    assert stats.drafted == sum(len(record.proposal) for record in records) == 7 * stats.cycles
    assert stats.accepted_length == (stats.accepted + stats.cycles) / stats.cycles
    # The prompt gives one token; the last cycle may hold more than were taken.
    assert stats.emitted - 1 <= stats.accepted + stats.cycles < stats.emitted - 1 + 8
    assert list(stats.accepted_at) == sorted(stats.accepted_at, reverse=True)
    assert set(stats.seconds) == {"inject", "draft", "select", "verify", "accept", "rollback", "host"}
    assert all(seconds > 0 for seconds in stats.seconds.values())


def test_records_tell_what_was_proposed_and_kept(drafted, tokens_of):
    records = []
    drafted.on_cycle = records.append
    text = tokens_of[17] + take(drafted, tokens_of[17], 60)
    drafted.on_cycle = None
    for record in records[:-1]:
        assert text[record.position] == record.anchor
        kept = record.proposal[: record.accepted]
        assert tuple(text[record.position + 1 : record.position + 1 + record.accepted]) == kept
        if record.accepted < len(record.proposal):
            assert text[record.position + 1 + record.accepted] != record.proposal[record.accepted]


def test_drafting_off_evaluates_nothing_but_the_target(plain, fresh, tokens_of):
    llama = fresh(depth=0)
    assert take(llama, tokens_of[0], 40) == take(plain, tokens_of[0], 40)
    assert llama.stats.cycles == 0
    assert llama.stats.emitted == 40


def test_switching_depth_between_requests_keeps_proposals(fresh, tokens_of):
    """A prefix that was evaluated without drafting is injected when drafting comes back."""

    llama = fresh(depth=0)
    take(llama, tokens_of[3], 30)
    llama.depth = 7
    assert proposals(llama, tokens_of[3]) == proposals(fresh(), tokens_of[3])


def test_a_shared_prefix_leaves_the_proposals_as_without_reuse(fresh, tokens_of):
    shared = (tokens_of[0] + tokens_of[1])[:40]
    used = fresh()
    take(used, shared + tokens_of[3], 50)
    assert proposals(used, shared + tokens_of[4]) == proposals(fresh(), shared + tokens_of[4])


def test_a_prefix_whose_window_is_gone_still_gives_the_same_tokens(plain, drafted, tokens_of):
    shared = tokens_of[0][:20]
    for llama in (plain, drafted):
        llama.reset()
    for tail in (tokens_of[1], tokens_of[2], tokens_of[3]):
        assert take(drafted, shared + tail, 260) == take(plain, shared + tail, 260)


def test_a_useless_drafter_is_noticed_and_switched_off(plain, target_path, useless_drafter, tokens_of):
    llama = DFlashLlama(target_path, useless_drafter, **EXACT)
    with pytest.warns(RuntimeWarning, match="drafting is switched off"):
        assert take(llama, tokens_of[0], 100) == take(plain, tokens_of[0], 100)
    assert llama.stats.cycles == 32
    assert take(llama, tokens_of[1], 20) == take(plain, tokens_of[1], 20)
    assert llama.stats.cycles == 32
    llama.depth = 7
    take(llama, tokens_of[1], 20)
    assert llama.stats.cycles > 32
    llama.close()


@pytest.fixture
def useless_drafter(drafter_gguf, tmp_path):
    """The drafter with its last norm zeroed: it proposes the same tokens whatever it reads."""
    from dflash2.gguf_info import read_gguf_info

    tensor = read_gguf_info(drafter_gguf).tensor("output_norm.weight")
    data = bytearray(drafter_gguf.read_bytes())
    data[tensor.offset : tensor.offset + tensor.n_bytes] = bytes(tensor.n_bytes)
    path = tmp_path / "useless.gguf"
    path.write_bytes(data)
    return path


def test_a_pickled_object_generates_the_same(fresh, tokens_of):
    llama = fresh(depth=5, verify="rejection")
    copy = pickle.loads(pickle.dumps(llama))
    assert (copy.depth, copy.verify) == (5, "rejection")
    assert take(copy, tokens_of[0], 20) == take(llama, tokens_of[0], 20)
    copy.close()


def test_a_closed_object_raises(fresh, tokens_of):
    llama = fresh()
    take(llama, tokens_of[0], 10)
    generator = llama.generate(tokens_of[0], **GREEDY)
    next(generator)
    llama.close()
    llama.close()
    assert list(generator) == []
    for attempt in (
        lambda: take(llama, tokens_of[0], 1),
        lambda: setattr(llama, "depth", 3),
        lambda: llama("x"),
        lambda: llama.tokenize(b"x"),
        lambda: llama.eval([5]),
        llama.sample,
        llama.reset,
        llama.save_state,
        llama.token_eos,
        llama.n_ctx,
    ):
        with pytest.raises(NativeError, match="closed"):
            attempt()


@pytest.mark.parametrize("depth", [-1, 8])
def test_a_depth_outside_the_block_is_refused(fresh, depth):
    with pytest.raises(Dflash2Error, match=r"0\.\.7"):
        fresh(depth=depth)


def test_a_depth_beyond_the_batch_is_refused(fresh):
    with pytest.raises(Dflash2Error, match="n_batch of at least 8"):
        fresh(n_batch=4, depth=7)
    assert len(take(fresh(n_batch=4, depth=3), [5, 6, 7, 8, 9, 10], 12)) == 12


def test_arguments_that_exclude_drafting_are_refused(fresh):
    with pytest.raises(Dflash2Error, match="draft_model"):
        fresh(draft_model=object())
    with pytest.raises(Dflash2Error, match="embedding"):
        fresh(embedding=True)


def test_generate_takes_the_arguments_of_plain_llama():
    assert list(inspect.signature(DFlashLlama.generate).parameters) == list(
        inspect.signature(Llama.generate).parameters
    )


def test_the_cycle_is_six_calls_in_one_short_module():
    path = Path(dflash2.runtime.__file__).with_name("cycle.py")
    assert len(path.read_text().splitlines()) < 80
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = [node.func for node in nodes if isinstance(node, ast.Call)]
    names = [getattr(name, "id", None) or getattr(name, "attr", None) for name in names]
    for word in ("inject", "draft", "select", "verify", "rollback"):
        assert path.with_name(f"{word}.py").exists()
        assert word in names
    assert path.with_name("accept.py").exists()
    assert "Acceptance" in names


def test_a_small_context_ends_where_plain_llama_ends(target_path, drafter_gguf, prompts):
    small = {**EXACT, "n_ctx": 64, "n_batch": 16}
    text = prompts[0][:40]
    plain = Llama(str(target_path), **small)
    expected = plain(text, max_tokens=-1, temperature=0)
    plain.close()
    llama = DFlashLlama(target_path, drafter_gguf, depth=None, auto_disable=False, **small)
    assert llama(text, max_tokens=-1, temperature=0)["choices"] == expected["choices"]
    llama.close()


def test_the_default_depth_fits_a_small_batch(target_path, drafter_gguf):
    llama = DFlashLlama(target_path, drafter_gguf, depth=None, **{**EXACT, "n_batch": 4})
    assert llama.depth == 3
    llama.close()


@pytest.mark.parametrize("depth", [2.5, "3", None, True])
def test_a_depth_that_is_no_number_is_refused(fresh, depth):
    llama = fresh()
    with pytest.raises(Dflash2Error, match=r"whole number in 0\.\.7"):
        llama.depth = depth
