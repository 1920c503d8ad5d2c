"""Text of growing lists: byte for byte that of llama_cpp, with every token looked up once."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llama_cpp import Llama, LogitsProcessorList

from dflash2 import DFlashLlama
from dflash2.errors import NativeError
from dflash2.runtime.detokenize import Detokenizer

EXACT = {"n_ctx": 256, "n_threads": 1, "n_threads_batch": 1, "flash_attn": True, "verbose": False}
BOS = 1
PIECES = {1: b"<s>", 2: b" a", 3: b"\xe2", 4: b"\x82", 5: b"\xac", 6: b"", 7: b" ", 8: b"bc", 9: b"\xff"}


def by_hand(tokens):
    text = b"".join(PIECES[token] for token in tokens)
    return text[1:] if tokens and tokens[0] == BOS and text[:1] == b" " else text


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.lists(st.sampled_from(sorted(PIECES)), max_size=14)), max_size=12))
def test_any_sequence_of_lists_gives_the_pieces_in_order(steps):
    detokenizer = Detokenizer(PIECES.__getitem__, BOS)
    tokens: list[int] = []
    for kind, more in steps:
        tokens = {0: tokens + more, 1: more, 2: tokens[: len(more)], 3: tokens[:3] + more}[kind]
        assert detokenizer.text(tokens) == by_hand(tokens)


def test_a_leading_space_is_dropped_behind_the_first_token_of_a_text():
    detokenizer = Detokenizer({1: b" <s>", 2: b" a"}.__getitem__, BOS)
    assert detokenizer.text([1, 2]) == b"<s> a"
    assert detokenizer.text([2, 1]) == b" a <s>"
    assert detokenizer.text([1] + [2] * 20) == b"<s>" + b" a" * 20


def test_a_list_changed_in_place_is_seen():
    detokenizer = Detokenizer(PIECES.__getitem__, BOS)
    tokens = [2] * 20
    detokenizer.text(tokens)
    tokens[5] = 8
    assert detokenizer.text(tokens) == by_hand(tokens)


def test_a_growing_list_looks_every_token_up_once():
    asked = []
    detokenizer = Detokenizer(lambda token: asked.append(token) or b"x" * (token % 3), BOS)
    tokens = []
    for token in range(1000):
        tokens.append(token)
        detokenizer.text(tokens)
    assert asked == list(range(1000))


@pytest.fixture(scope="module")
def both(target_path, drafter_gguf):
    pair = (
        Llama(str(target_path), **EXACT),
        DFlashLlama(target_path, drafter_gguf, depth=None, auto_disable=False, **EXACT),
    )
    yield pair
    for llama in pair:
        llama.close()


def test_every_token_and_random_lists_equal_those_of_plain_llama(both):
    plain, ours = both
    rng = random.Random(2)
    vocabulary = range(plain.n_vocab())
    for token in vocabulary:
        assert ours.detokenize([token]) == plain.detokenize([token])
        assert ours.detokenize([token], special=True) == plain.detokenize([token], special=True)
    tokens = []
    for _ in range(800):
        tokens.append(rng.choice(vocabulary))
        assert ours.detokenize(tokens, prev_tokens=[5]) == plain.detokenize(tokens, prev_tokens=[5])
        assert ours.detokenize(tokens[-5:]) == plain.detokenize(tokens[-5:])


class Script:
    """A logits processor that makes a model say given tokens."""

    def __init__(self, tokens, n_prompt):
        self.tokens, self.n_prompt = tokens, n_prompt

    def __call__(self, ids, scores):
        scores[self.tokens[len(ids) - self.n_prompt]] = 1e4
        return scores


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("stop", [None, "漢字", "\ufffd"])
def test_a_completion_of_odd_bytes_equals_that_of_plain_llama(both, stream, stop):
    plain = both[0]
    rng = random.Random(6)
    odd = [token for token in range(plain.n_vocab()) if not plain.detokenize([token]).isascii()]
    words = [plain.tokenize(word.encode(), add_bos=False) for word in ("é¢", "漢字", "🙂", "€ x", " plain", "\x00\x7f")]
    script = [token for _ in range(150) for token in (*rng.choice(words), *rng.sample(odd, rng.randrange(2)))]
    n_prompt = len(plain.tokenize(b"go"))
    answers = []
    for llama in both:
        answer = llama(
            "go", max_tokens=180, temperature=0.0, stream=stream, stop=stop,
            logits_processor=LogitsProcessorList([Script(script, n_prompt)]),
        )  # fmt: skip
        answers.append([chunk["choices"][0]["text"] for chunk in (answer if stream else [answer])])
    assert answers[0] == answers[1]
    assert not "".join(answers[0]).isascii()


def test_a_token_outside_the_vocabulary_is_refused(both):
    with pytest.raises(NativeError, match="token ids"):
        both[1].detokenize([both[1].n_vocab()])
