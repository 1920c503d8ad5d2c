"""What users do between and around requests: states, caches, chat handlers that evaluate by themselves, adapters."""

import pickle
from concurrent.futures import ThreadPoolExecutor

import llama_cpp
import numpy as np
import pytest
from generation import EXACT
from gguf import GGUFWriter
from llama_cpp import Llama, LlamaDiskCache, LlamaRAMCache

from dflash2 import DFlashLlama
from dflash2.errors import NativeError
from dflash2.gguf_info import read_gguf_info
from dflash2.runtime.state import DFlashState

GREEDY = {"max_tokens": 40, "temperature": 0.0}


@pytest.fixture(scope="module")
def plain(target_path):
    llama = Llama(str(target_path), **EXACT)
    yield llama
    llama.close()


def text(response):
    return response["choices"][0]["text"]


def records_of(llama, ask):
    """What `ask` makes the drafter propose, cycle by cycle."""
    records = []
    llama.on_cycle = records.append
    ask()
    llama.on_cycle = None
    return records


@pytest.mark.parametrize("kind", ["ram", "disk"])
def test_the_prompt_cache_restores_both_models(fresh, prompts, tmp_path, kind):
    first, between = prompts[0], prompts[1]
    llama, straight = fresh(), fresh()
    llama.set_cache(LlamaRAMCache() if kind == "ram" else LlamaDiskCache(str(tmp_path)))
    answer = text(llama(first, **GREEDY))
    assert text(straight(first, **GREEDY)) == answer
    llama(between, **GREEDY)
    llama.reset_stats()
    following = first + answer + "\n\n"
    got = records_of(llama, lambda: llama(following, **GREEDY))
    assert llama.stats.prompt_tokens < 12  # nothing of the first prompt
    assert got == records_of(straight, lambda: straight(following, **GREEDY))
    assert sum(record.accepted for record in got) > 10


def test_a_state_holds_no_scores_and_fits_plain_llama(plain, fresh, prompts):
    llama = fresh()
    llama(prompts[2], **GREEDY)
    state = pickle.loads(pickle.dumps(llama.save_state()))
    assert isinstance(state, DFlashState)
    assert state.scores.shape == (1, llama.n_vocab())
    expected = text(llama(prompts[2], **GREEDY))
    plain.load_state(state)
    assert text(plain(prompts[2], **GREEDY)) == expected
    llama.load_state(plain.save_state())
    assert text(llama(prompts[2], **GREEDY)) == expected


def test_the_prompt_cache_with_logprobs(fresh, prompts):
    llama, straight = fresh(), fresh()
    llama.set_cache(LlamaRAMCache())
    arguments = {"logprobs": 2, **GREEDY}
    answers = []
    for prompt in (prompts[0], prompts[1], prompts[0]):
        straight.reset()
        answers.append((llama(prompt, **arguments)["choices"], straight(prompt, **arguments)["choices"]))
    assert all(got == expected for got, expected in answers)


def test_sampling_from_a_restored_state_asks_for_an_evaluation(fresh, prompts):
    llama = fresh()
    tokens = llama.tokenize(prompts[0].encode())
    llama.eval(tokens)
    first = llama.sample(temp=0.0)
    state = llama.save_state()
    llama.eval(llama.tokenize(prompts[1].encode()))
    llama.load_state(state)
    with pytest.raises(NativeError, match="logits"):
        llama.sample(temp=0.0)
    assert next(llama.generate([], reset=False, temp=0.0)) == first


def test_a_state_with_all_logits_restores_them(fresh, prompts):
    llama = fresh(logits_all=True)
    tokens = llama.tokenize(prompts[3].encode())
    llama.eval(tokens)
    state, scores = llama.save_state(), llama.scores[: len(tokens)].copy()
    llama(prompts[4], **GREEDY)
    llama.load_state(state)
    np.testing.assert_array_equal(llama.scores[: len(tokens)], scores)


class ByItself:
    """A chat handler that evaluates as those for images do: embeddings through the context, text through `eval`."""

    def __init__(self, parts):
        self.parts = parts  # lists of tokens, or of rows of embeddings; ("tokens", ...) go through the context too

    def __call__(self, *, llama, messages, temperature, max_tokens, stream=False, **_):
        del messages
        llama.reset()
        llama._ctx.kv_cache_clear()
        for part in self.parts:
            if isinstance(part, list):
                llama.eval(part)
            else:
                self.decode(llama, part)
        prompt = llama.input_ids[: llama.n_tokens].tolist()
        return llama.create_completion(prompt=prompt, temperature=temperature, max_tokens=max_tokens, stream=stream)

    def decode(self, llama, part):
        n = len(part)
        as_tokens = part.ndim == 1
        batch = llama_cpp.llama_batch_init(n, 0 if as_tokens else part.shape[1], 1)
        batch.n_tokens = n
        for i in range(n):
            if as_tokens:
                batch.token[i] = int(part[i])
                llama.input_ids[llama.n_tokens + i] = part[i]
            batch.pos[i] = llama.n_tokens + i
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
            batch.logits[i] = i == n - 1
        if not as_tokens:
            llama_cpp.ctypes.memmove(batch.embd, part.ctypes.data, part.nbytes)
        assert llama_cpp.llama_decode(llama._ctx.ctx, batch) == 0
        llama_cpp.llama_batch_free(batch)
        llama.n_tokens += n


@pytest.fixture(scope="module")
def pictures(plain):
    """Rows that look like token embeddings but are none."""
    rng = np.random.default_rng(3)
    return [rng.standard_normal((n, plain.n_embd())).astype(np.float32) * 0.05 for n in (9, 5)]


def handled(llama, parts):
    llama.chat_handler = ByItself(parts)
    llama.input_ids[:] = 0
    return text(llama.create_chat_completion([{"role": "user", "content": "?"}], **GREEDY))


@pytest.mark.parametrize("order", ["text, image, text", "image, text", "two images", "text, image", "tokens"])
def test_a_handler_that_evaluates_by_itself_gives_the_text_of_plain_llama(plain, fresh, prompts, pictures, order):
    llama = fresh()
    tokens = plain.tokenize(prompts[0].encode())
    before, after = tokens[:30], tokens[30:50]
    parts = {
        "text, image, text": [before, pictures[0], after],
        "image, text": [pictures[0], after],
        "two images": [before, pictures[0], after, pictures[1], after[:7]],
        "text, image": [before, pictures[0]],
        "tokens": [np.asarray(before, np.int32), np.asarray(after, np.int32)],
    }[order]
    expected = handled(plain, parts)
    llama(prompts[1], **GREEDY)  # something else is in both memories
    assert handled(llama, parts) == expected
    assert handled(llama, parts) == expected
    assert text(llama(prompts[1], **GREEDY)) == text(plain(prompts[1], **GREEDY))
    assert llama.stats.accepted > 0


def test_a_picture_stays_with_its_answer_whoever_else_asks(plain, fresh, prompts, pictures):
    llama = fresh()
    tokens = plain.tokenize(prompts[0].encode())
    parts = [tokens[:30], pictures[0], tokens[30:50]]
    expected = [handled(plain, parts), text(plain(prompts[1], **GREEDY))]
    llama.chat_handler = ByItself(parts)
    messages = [{"role": "user", "content": "?"}]
    llama.input_ids[:] = 0
    with ThreadPoolExecutor(4) as pool:
        chats = [pool.submit(llama.create_chat_completion, messages, **GREEDY) for _ in range(4)]
        others = [pool.submit(llama, prompts[1], **GREEDY) for _ in range(4)]
        assert {text(other.result()) for other in others} == {expected[1]}
        answers = {text(chat.result()) for chat in chats}
    assert answers == {expected[0]}
    streams = [llama.create_chat_completion(messages, stream=True, **GREEDY) for _ in range(2)]
    assert text(llama(prompts[1], **GREEDY)) == expected[1]
    for stream in streams:  # superseded, but its beginning was already there
        (begun,) = stream
        assert expected[0].startswith(text(begun))


def test_memory_cleared_through_the_context_is_noticed(plain, fresh, prompts):
    llama = fresh()
    expected = text(plain(prompts[2], **GREEDY))
    assert text(llama(prompts[2], **GREEDY)) == expected
    llama._ctx.kv_cache_clear()
    llama.n_tokens = 0
    assert text(llama(prompts[2], **GREEDY)) == expected


def test_fewer_tokens_than_evaluated(plain, fresh, prompts):
    llama = fresh()
    tokens = plain.tokenize(prompts[5].encode())
    results = []
    for each in (plain, llama):
        each.reset()
        each.eval(tokens)
        each.n_tokens = 10
        each.eval(tokens[20:40])
        generator = each.generate([], reset=False, temp=0.0)
        results.append([next(generator) for _ in range(20)])
        generator.close()
    assert results[0] == results[1]


@pytest.fixture(scope="module")
def adapter(target_path, tmp_path_factory):
    """A random LoRA adapter of rank 4 for every query projection of the target."""
    info = read_gguf_info(target_path)
    path = tmp_path_factory.mktemp("lora") / "adapter.gguf"
    writer = GGUFWriter(str(path), str(info.metadata["general.architecture"]))
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 8.0)
    rng = np.random.default_rng(5)
    for name, shape in _projections(info):
        inputs, outputs = shape
        writer.add_tensor(f"{name}.lora_a", rng.standard_normal((4, inputs)).astype(np.float32) * 0.2)
        writer.add_tensor(f"{name}.lora_b", rng.standard_normal((outputs, 4)).astype(np.float32) * 0.2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _projections(info):
    """(name, shape as stored: inputs first) of the query projections."""
    return [(tensor.name, tensor.shape) for tensor in info.tensors if tensor.name.endswith("attn_q.weight")]


def test_an_adapter_on_the_target_changes_its_text_and_warns_about_acceptance(
    target_path, drafter_gguf, adapter, prompts, plain
):
    adapted = Llama(str(target_path), lora_path=str(adapter), **EXACT)
    expected = text(adapted(prompts[0], **GREEDY))
    adapted.close()
    assert expected != text(plain(prompts[0], **GREEDY))
    with pytest.warns(RuntimeWarning, match="LoRA"):
        llama = DFlashLlama(target_path, drafter_gguf, lora_path=str(adapter), depth=None, auto_disable=False, **EXACT)
    assert text(llama(prompts[0], **GREEDY)) == expected
    copy = pickle.loads(pickle.dumps(llama))
    assert text(copy(prompts[0], **GREEDY)) == expected
    for each in (llama, copy):
        each.close()


def test_a_shared_prefix_is_neither_evaluated_nor_injected_again(fresh, prompts):
    llama = fresh()
    tokens = llama.tokenize(prompts[0].encode())
    first = [token for _, token in zip(range(24), llama.generate(tokens, temp=0.0), strict=False)]
    injected = llama._session.injection.reached
    llama.reset_stats()
    following = [*tokens, *first[:20], *tokens[:6]]
    next(llama.generate(following, temp=0.0))
    assert llama.stats.prompt_tokens == 6
    assert injected >= len(tokens) + 12
    assert llama._session.injection.reached >= len(following)
