"""Every request of the `llama_cpp.Llama` API, with drafting and without: text, reasons, usage, logprobs and chunks."""

import pytest
from generation import EXACT
from llama_cpp import Llama, LlamaGrammar, LogitsProcessorList, StoppingCriteriaList

from dflash2 import Dflash2Error, DFlashLlama
from dflash2.errors import EmptyPromptError, UnsupportedCallError

JSON_GRAMMAR = r"""
root ::= "{" ws "\"n\":" ws [0-9]+ "}"
ws ::= " "?
"""
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "n": {"type": "integer"}}}
TOOL = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Look a word up.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "maxLength": 8}},
            "required": ["word"],
        },
    },
}
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "def add(a, b):"}]
# Differ between any two calls.
PASSING = ("id", "created", "model")


@pytest.fixture(scope="module")
def plain(target_path):
    llama = Llama(str(target_path), logits_all=True, **EXACT)
    yield llama
    llama.close()


@pytest.fixture(scope="module")
def drafted(target_path, drafter_gguf):
    llama = DFlashLlama(target_path, drafter_gguf, depth=None, auto_disable=False, verify="match", **EXACT)
    yield llama
    llama.close()


def answer(response):
    """`response`, or the chunks of a stream, without what differs between any two calls."""
    if not isinstance(response, dict):
        return [answer(chunk) for chunk in response]
    return {name: value for name, value in response.items() if name not in PASSING}


def both(plain, drafted, call):
    """What `call` returns for both objects, nothing reused from earlier requests."""
    results = []
    for llama in (plain, drafted):
        llama.reset()
        results.append(answer(call(llama)))
    return results


def never_twice(ids, scores):
    scores[ids[-1]] = -1e9
    return scores


COMPLETIONS = {
    "plain": {},
    "max_tokens 1": {"max_tokens": 1},
    "echo": {"echo": True},
    "suffix": {"suffix": "\n    return x\n"},
    "one stop": {"stop": "\n"},
    "several stops": {"stop": ["zzz", "):", "    "]},
    "bias against the usual tokens": {"logit_bias": {"301": -100.0, "366": -100.0, "15": 5.0}},
    "repeat penalty": {"repeat_penalty": 1.3},
    "frequency and presence penalty": {"frequency_penalty": 0.7, "presence_penalty": 0.4},
    "seed and temperature": {"temperature": 0.9, "seed": 11},
    "narrow sampling": {"temperature": 0.7, "top_k": 12, "top_p": 0.8, "min_p": 0.02, "typical_p": 0.9, "seed": 3},
    "mirostat": {"temperature": 1.0, "mirostat_mode": 2, "seed": 5},
    "top logprobs": {"logprobs": 4},
    "logprobs of the chosen only": {"logprobs": 0},
    "logprobs and echo": {"logprobs": 2, "echo": True},
    "logprobs and stop": {"logprobs": 2, "stop": ["\n"]},
    "logprobs of a sampled request": {"logprobs": 3, "temperature": 0.8, "seed": 7},
    "model name": {"model": "a name"},
    "processor": {"logits_processor": LogitsProcessorList([never_twice])},
    "criterion": {"stopping_criteria": StoppingCriteriaList([lambda ids, _: len(ids) >= 40])},
}


@pytest.mark.parametrize("max_tokens", [0, -1, None])
def test_no_limit_of_tokens_ends_with_the_context(target_path, drafter_gguf, prompts, max_tokens):
    small = {**EXACT, "n_ctx": 256}
    plain = Llama(str(target_path), **small)
    drafted = DFlashLlama(target_path, drafter_gguf, depth=None, auto_disable=False, **small)
    for stream in (False, True):
        arguments = {"max_tokens": max_tokens, "temperature": 0.0, "stream": stream}
        expected, got = both(plain, drafted, lambda llama, a=arguments: llama(prompts[0][:100], **a))
        assert got == expected
        assert (got[-1] if stream else got)["choices"][0]["finish_reason"] == "length"
    for llama in (plain, drafted):
        with pytest.raises(ValueError, match="exceed context window"):
            llama(prompts[0] * 20, max_tokens=4)
        llama.close()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("name", COMPLETIONS)
def test_a_completion_equals_that_of_plain_llama(plain, drafted, prompts, name, stream):
    arguments = {"max_tokens": 32, "temperature": 0.0, "stream": stream, **COMPLETIONS[name]}
    expected, got = both(plain, drafted, lambda llama: llama.create_completion(prompts[0][:160], **arguments))
    assert got == expected


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_grammar_gives_what_plain_llama_gives(plain, drafted, prompts, stream):
    def call(llama):
        grammar = LlamaGrammar.from_string(JSON_GRAMMAR, verbose=False)
        return llama(prompts[1], max_tokens=24, temperature=0.0, grammar=grammar, stream=stream)

    expected, got = both(plain, drafted, call)
    assert got == expected
    text = "".join(part["choices"][0]["text"] for part in (got if stream else [got]))
    assert text.startswith("{")


def test_every_stop_string_across_token_borders_cuts_where_plain_llama_cuts(plain, drafted, prompts):
    text = plain(prompts[2], max_tokens=60, temperature=0.0)["choices"][0]["text"]
    for start in range(4, 40, 3):
        stop = text[start : start + 5]
        for stream in (False, True):
            arguments = {"max_tokens": 60, "temperature": 0.0, "stop": [stop], "stream": stream}
            expected, got = both(plain, drafted, lambda llama, a=arguments: llama(prompts[2], **a))
            assert got == expected, stop


@pytest.mark.parametrize("infill", [False, True])
def test_infill_in_either_order(target_path, drafter_gguf, prompts, infill):
    plain = Llama(str(target_path), spm_infill=infill, **EXACT)
    drafted = DFlashLlama(target_path, drafter_gguf, depth=None, auto_disable=False, spm_infill=infill, **EXACT)
    arguments = {"suffix": "\n    return x\n", "max_tokens": 24, "temperature": 0.0}
    expected, got = both(plain, drafted, lambda llama: llama(prompts[0][:80], **arguments))
    assert got == expected
    for llama in (plain, drafted):
        llama.close()


def test_token_ids_as_prompt(plain, drafted, prompts):
    tokens = plain.tokenize(prompts[3].encode())
    expected, got = both(plain, drafted, lambda llama: llama(tokens, max_tokens=30, temperature=0.0))
    assert got == expected


CHATS = {
    "plain": {},
    "stop": {"stop": ["\n"]},
    "logprobs": {"logprobs": True, "top_logprobs": 3},
    "json": {"response_format": {"type": "json_object"}},
    "schema": {"response_format": {"type": "json_object", "schema": SCHEMA}},
    "seed": {"temperature": 0.8, "seed": 21},
    "bias": {"logit_bias": {"301": -100.0}},
    "tools": {"tools": [TOOL], "tool_choice": "auto"},
    "forced tool": {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "lookup"}}},
    "legacy function": {"functions": [TOOL["function"]], "function_call": {"name": "lookup"}},
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("format_", ["chatml", "chatml-function-calling"])
@pytest.mark.parametrize("name", CHATS)
def test_a_chat_equals_that_of_plain_llama(plain, drafted, name, format_, stream):
    plain.chat_format = drafted.chat_format = format_
    arguments = {"max_tokens": 40, "temperature": 0.0, "stream": stream, **CHATS[name]}

    def call(llama):
        try:
            return answer(llama.create_chat_completion(MESSAGES, **arguments))
        except (ValueError, TypeError) as error:  # what a format refuses, it refuses of both
            return {"error": str(error)}

    expected, got = (_without_call_ids(result) for result in both(plain, drafted, call))
    assert got == expected
    if name == "plain":
        assert "error" not in got


def _without_call_ids(result):
    """Ids of tool calls hold the id of their completion, which differs between any two calls."""
    if isinstance(result, list):
        return [_without_call_ids(item) for item in result]
    if isinstance(result, dict):
        return {key: _without_call_ids(value) for key, value in result.items() if key != "id"}
    return result


def test_an_empty_prompt_is_refused_as_in_plain_llama(plain, drafted):
    for llama in (plain, drafted):
        llama.reset()
        with pytest.raises(AssertionError):
            next(llama.generate([], temp=0.0))
        with pytest.raises(AssertionError):
            llama("", max_tokens=3, temperature=0.0)
    with pytest.raises(EmptyPromptError, match="empty"):
        drafted("", max_tokens=3)


def test_generation_goes_on_from_evaluated_tokens(plain, drafted, prompts):
    tokens = plain.tokenize(prompts[4].encode())

    def call(llama):
        llama.eval(tokens)
        generator = llama.generate([], reset=False, temp=0.0)
        return [{"token": next(generator)} for _ in range(30)]

    expected, got = both(plain, drafted, call)
    assert got == expected


def test_an_evaluated_prompt_is_not_evaluated_again(drafted, prompts):
    tokens = drafted.tokenize(prompts[5].encode())
    drafted.reset()
    first = [token for _, token in zip(range(20), drafted.generate(tokens, temp=0.0), strict=False)]
    drafted.reset()
    drafted.eval(tokens)
    drafted.reset_stats()
    assert [token for _, token in zip(range(20), drafted.generate(tokens, temp=0.0), strict=False)] == first
    assert drafted.stats.prompt_tokens == 0


def test_embeddings_are_refused_and_leave_the_session_as_it_was(plain, drafted, prompts):
    whole = answer(plain(prompts[6], max_tokens=40, temperature=0.0))["choices"][0]["text"]
    stream = drafted(prompts[6], max_tokens=40, temperature=0.0, stream=True)
    text = next(stream)["choices"][0]["text"]
    for refused in (drafted.embed, drafted.create_embedding):
        with pytest.raises(RuntimeError, match="embedding=True"):
            refused("a text")
    assert text + "".join(chunk["choices"][0]["text"] for chunk in stream) == whole
    assert issubclass(UnsupportedCallError, Dflash2Error)


def test_logprobs_keep_only_the_rows_they_need(drafted, prompts, monkeypatch):
    sizes = []
    from dflash2.runtime.scores import KeptScores

    read = KeptScores.__getitem__
    monkeypatch.setattr(
        KeptScores, "__getitem__", lambda self, index: sizes.append(len(self._rows)) or read(self, index)
    )
    drafted(prompts[0], max_tokens=10, temperature=0.0, logprobs=1)
    assert max(sizes) <= 16
    assert drafted.scores.shape == (1, drafted.n_vocab())
    with pytest.raises(ValueError, match="exceed context window"):
        drafted(prompts[0] * 20, logprobs=1)
    assert drafted.scores.shape == (1, drafted.n_vocab())
