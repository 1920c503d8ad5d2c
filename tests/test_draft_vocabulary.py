"""A head trimmed to a draft vocabulary: which tokens it has, and that the output stays the target's."""

import json
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from factories import MASK_TOKEN, VOCAB, make_drafter, make_target
from factories_carry import changed_gguf, tensor_bytes, types_of
from gguf.constants import GGUFValueType
from hypothesis import given, settings
from hypothesis import strategies as st
from llama_cpp import Llama

from dflash2 import DFlashLlama
from dflash2.commands.convert import convert as convert_command
from dflash2.converter import DraftVocabulary, convert
from dflash2.converter.carried.draft_vocabulary import special_tokens
from dflash2.converter.carried.frequencies import count_tokens
from dflash2.errors import DraftVocabularyError, NativeError
from dflash2.gguf_info import read_gguf_info
from dflash2.native import Tokenizer

TOP_K = 4  # of the tiny drafter
DEMO_TOP_K = 16


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return make_target(tmp_path / "target.gguf")


def counts_file(path: Path, counts: dict[int, int]) -> Path:
    path.write_text("".join(f"{token}\t{count}\n" for token, count in counts.items()))
    return path


def kept_tokens(path: Path) -> list[int]:
    return tensor_bytes(read_gguf_info(path), "d2t").view(np.int64).tolist()


def trimmed(target: Path, folder: Path, size: int, counts: dict[int, int], checkpoint: Path | None = None):
    checkpoint = checkpoint or make_drafter(folder / "drafter")
    files = (counts_file(folder / "counts.txt", counts),)
    return convert(checkpoint, target, folder / "out.gguf", draft_vocab=DraftVocabulary(size, files))


def test_special_and_frequent_tokens_are_kept_in_order_of_their_ids(tmp_path, target):
    done = trimmed(target, tmp_path, 6, {200: 5, 50: 9, 120: 5, 119: 5, 30: 4, 287: 6})
    assert kept_tokens(done.output) == [0, 1, 50, 119, 120, 287]
    assert types_of(done.output)["d2t"] == "I64"
    assert done.notes == (
        "The drafter proposes 6 of 288 tokens, 73.53% of those in the given frequencies; the output is the target's all"
        " the same.",
    )


def test_too_few_distinct_tokens_are_filled_up_by_the_lowest_ids(tmp_path, target):
    done = trimmed(target, tmp_path, 8, {70: 3, 5: 1})
    assert kept_tokens(done.output) == [0, 1, 2, 3, 4, 5, 6, 70]
    assert done.notes[-1] == (
        "4 tokens of the draft vocabulary never occur in the given frequencies: lowest ids fill it up."
    )


def test_the_head_holds_the_targets_rows_of_those_tokens_and_nothing_else_is_trimmed(tmp_path, target):
    done = trimmed(target, tmp_path, 7, dict.fromkeys((10, 11, 12, 90, 280), 1))
    info = read_gguf_info(done.output)
    table = tensor_bytes(read_gguf_info(target), "token_embd.weight").reshape(VOCAB, -1)
    rows = tensor_bytes(info, "output.weight").reshape(7, -1)
    np.testing.assert_array_equal(rows, table[[0, 1, 10, 11, 12, 90, 280]])
    assert "token_embd.weight" not in info.tensor_names
    assert info.tensor("selector_successor.weight").shape[1] == VOCAB


def test_special_are_control_and_user_defined_tokens_and_ids_the_tokenizer_names(tmp_path):
    types = [1] * VOCAB
    types[7], types[9], types[11] = 3, 4, 6
    target = make_target(
        tmp_path / "target.gguf",
        metadata={
            "tokenizer.ggml.token_type": (types, GGUFValueType.ARRAY, GGUFValueType.INT32),
            "tokenizer.ggml.eot_token_id": (44, GGUFValueType.UINT32, None),
            "tokenizer.ggml.eom_token_id": (2**32 - 1, GGUFValueType.UINT32, None),
            "tokenizer.ggml.mask_token_id": (60, GGUFValueType.UINT32, None),
        },
    )
    assert special_tokens(read_gguf_info(target)) == {0, 7, 9, 44}


@settings(max_examples=30, deadline=None)
@given(
    counts=st.dictionaries(st.integers(2, VOCAB - 1), st.integers(0, 50)).filter(lambda d: any(d.values())),
    size=st.integers(TOP_K, VOCAB),
)
def test_no_token_left_out_is_more_frequent_than_one_kept(tmp_path_factory, counts, size):
    folder = tmp_path_factory.mktemp("choice")
    done = trimmed(make_target(folder / "target.gguf"), folder, size, counts)
    kept = kept_tokens(done.output)
    assert kept == sorted(set(kept))
    assert len(kept) == size
    assert {0, MASK_TOKEN} <= set(kept)
    worst = min(((counts.get(token, 0), -token) for token in kept if token > 1), default=(99, 0))
    left = [(counts.get(token, 0), -token) for token in range(VOCAB) if token not in set(kept)]
    assert all(other < worst for other in left)


def test_lists_and_json_count_alike_and_add_up(tmp_path, target):
    lines = tmp_path / "a.txt"
    lines.write_bytes(b"\n7 3\r\n  9\t 1  \n\n7 1")
    objects = tmp_path / "b.json"
    objects.write_text('\ufeff{"9": 10, "0": 2}')
    counts = count_tokens([lines, objects], target, VOCAB)
    assert {token: int(counts[token]) for token in np.flatnonzero(counts)} == {0: 2, 7: 4, 9: 11}


@pytest.mark.parametrize("separator", [" ", "\t", ",", ";", ", ", " ; "])
@pytest.mark.parametrize("header", ["", "token_id{}count\n", "\n# ids and how often\n"])
def test_a_list_may_have_any_of_four_separators_and_one_header(tmp_path, target, separator, header):
    path = tmp_path / "counts.csv"
    path.write_text(header.format(separator) + f"7{separator}3\n9{separator}1\n")
    counts = count_tokens([path], target, VOCAB)
    assert {token: int(counts[token]) for token in np.flatnonzero(counts)} == {7: 3, 9: 1}


def test_text_with_some_lines_of_two_numbers_is_text(tmp_path, target_path, n_vocab):
    path = tmp_path / "text.txt"
    path.write_text("3 4\nfirst line\nsecond line\n")
    tokenizer = Tokenizer(target_path)
    expected = len(tokenizer.tokenize(path.read_text()))
    tokenizer.close()
    assert count_tokens([path], target_path, n_vocab).sum() == expected


def test_text_is_counted_in_the_targets_own_tokens(tmp_path, demo, target_path, n_vocab):
    text = "\n".join(demo.prompts[:20]) + "\n<|mask|> naïve 漢字 \U0001f600" + "long" * 3000
    path = tmp_path / "corpus.txt"
    path.write_text(text, encoding="utf-8")
    counts = count_tokens([path], target_path, n_vocab)
    tokenizer = Tokenizer(target_path)
    whole = Counter(tokenizer.tokenize(text).tolist())
    tokenizer.close()
    difference = sum(abs(int(counts[token]) - whole[token]) for token in range(n_vocab))
    assert counts[1] == 0  # the mask token's name is plain text
    assert counts.sum() > 5000
    assert difference < 0.01 * counts.sum()  # pieces are cut between lines


def test_a_tokenizer_gives_what_llama_cpp_python_gives(target_path, demo):
    tokenizer = Tokenizer(target_path)
    llm = Llama(str(target_path), vocab_only=True, verbose=False)
    for prompt in (*demo.prompts[:5], "", "<|endoftext|>", "a\x00b é"):
        expected = llm.tokenize(prompt.encode(), add_bos=False, special=False) if prompt else []
        assert tokenizer.tokenize(prompt).tolist() == expected
    llm.close()
    tokenizer.close()
    with pytest.raises(NativeError, match="closed"):
        tokenizer.tokenize("a")


BAD_FILES = {
    "no pair": ("a.txt", b"5 1\n6 x\n", r"a\.txt, line 2: expected a token id and a count, got '6 x"),
    "beyond the vocabulary": (
        "a.txt",
        b"5 1\n288 1\n",
        r"a\.txt, line 2, names token 288, the target's vocabulary has",
    ),
    "beyond it in JSON": ("a.json", b'{"999": 1}', r"a\.json, key '999', names token 999"),
    "a huge number": ("a.txt", b"5 1\n6 99999999999999999999\n", "holds the number 99999999999999999999"),
    "a list": ("a.json", b"[1, 2]", r"a\.json is not an object of token ids and counts"),
    "a negative count": ("a.json", b'{"5": -1}', "is not an object of token ids and counts"),
    "not JSON": ("a.json", b"{", r"a\.json is not valid JSON"),
    "JSON by its first character": ("a.txt", b"\n {not counts}", r"a\.txt is not valid JSON"),
    "JSON lines": ("a.txt", b'{"text": "a"}\n{"text": "b"}\n', r"a\.txt is not valid JSON"),
    "a list in a text file": ("a.txt", b"[[5, 1]]", r"a\.txt is not an object of token ids and counts"),
    "a key given twice": ("a.json", b'{"5": 1, "05": 2}', r"a\.json has the key '05' twice"),
    "NaN in JSON": ("a.json", b'{"5": NaN}', "is not an object of token ids and counts"),
    "counts with a fraction": ("a.txt", b"5 1.0\n6 2.0\n", r"line 1: expected a token id and a count, got '5 1\.0'"),
    "negative counts": ("a.txt", b"5 -1\n6 -2\n", "line 1: expected a token id and a count, got '5 -1'"),
    "negative ids": ("a.txt", b"-5,1\n", "line 1: expected a token id and a count, got '-5,1'"),
    "no number": ("a.txt", b"5 1\n6 nan\n", "line 2: expected a token id and a count, got '6 nan'"),
    "quotes": ("a.csv", b'"id","count"\n"5","1"\n', r"line 2: expected a token id and a count"),
    "colons": ("a.txt", b"5: 1\n6: 2\n", "line 1: expected a token id and a count, got '5: 1'"),
    "two headers": ("a.txt", b"id count\n-- --\n5 1\n6 1\n", "line 2: expected a token id and a count"),
    "half of a list": ("a.txt", b"word\n5 1\nsecond word\n6 1\n", "line 3: expected a token id and a count"),
    "an empty file": ("a.txt", b"", r"a\.txt counts no token"),
    "an empty object": ("a.json", b"{}", r"a\.json counts no token"),
    "an empty JSON file": ("a.json", b"", r"a\.json counts no token"),
    "nothing but zeros": ("a.txt", b"5 0\n6 0\n", r"a\.txt counts no token"),
    "not UTF-8": ("a.txt", b"caf\xe9", r"a\.txt is not UTF-8 text"),
    "counts that do not add up": ("a.txt", b"5 999999999999999999\n" * 6, "too large to add up"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_file_is_refused_by_name(tmp_path, target, case):
    name, data, message = BAD_FILES[case]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DraftVocabularyError, match=message):
        count_tokens([tmp_path / name], target, VOCAB)


def test_a_missing_file_is_named(tmp_path, target):
    with pytest.raises(DraftVocabularyError, match=r"Cannot read .*gone\.txt: No such file"):
        count_tokens([tmp_path / "gone.txt"], target, VOCAB)


def test_a_pipe_is_refused_before_it_is_waited_for(tmp_path, target):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DraftVocabularyError, match="is no file, but a folder, pipe or device"):
        count_tokens([tmp_path / "pipe"], target, VOCAB)


def test_text_for_a_vocabulary_that_llama_cpp_cannot_load_is_refused(tmp_path):
    unknown = ("no-such-pre-tokenizer", GGUFValueType.STRING, None)
    target = make_target(tmp_path / "target.gguf", metadata={"tokenizer.ggml.pre": unknown})
    (tmp_path / "text.txt").write_text("some text")
    with pytest.raises(NativeError, match=r"cannot load the vocabulary of .*no-such-pre-tokenizer"):
        count_tokens([tmp_path / "text.txt"], target, VOCAB)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (TOP_K - 1, "of 3 tokens is too small: the selector ranks 4 candidates per position; ask for at least 4"),
        (VOCAB + 1, "of 289 tokens is more than the target's 288"),
    ],
)
def test_a_size_that_does_not_fit_is_refused(tmp_path, target, size, message):
    with pytest.raises(DraftVocabularyError, match=message):
        trimmed(target, tmp_path, size, {5: 1})
    assert not (tmp_path / "out.gguf").exists()


def test_a_size_below_the_number_of_special_tokens_is_refused(tmp_path):
    types = ([3] * 10 + [1] * (VOCAB - 10), GGUFValueType.ARRAY, GGUFValueType.INT32)
    target = make_target(tmp_path / "target.gguf", metadata={"tokenizer.ggml.token_type": types})
    with pytest.raises(DraftVocabularyError, match="special tokens are 10 already; ask for at least 10"):
        trimmed(target, tmp_path, 9, {50: 1})


def test_a_draft_vocabulary_without_frequencies_is_refused(tmp_path, target):
    with pytest.raises(DraftVocabularyError, match="--draft-vocab-from FILE"):
        convert(make_drafter(tmp_path / "d"), target, tmp_path / "out.gguf", draft_vocab=DraftVocabulary(64, ()))


def test_the_command_takes_both_options_or_neither(tmp_path, target):
    drafter, counts = make_drafter(tmp_path / "d"), counts_file(tmp_path / "c.txt", {80: 2})
    arguments = [str(drafter), "--target", str(target), "-o", str(tmp_path / "out.gguf")]
    for option in (["--draft-vocab", "64"], ["--draft-vocab-from", str(counts)]):
        refused = CliRunner().invoke(convert_command, [*arguments, *option])
        assert refused.exit_code == 2
        assert "belong together" in refused.output
    options = ["--draft-vocab", "64", "--draft-vocab-from", str(counts), "--embed-target-head"]
    assert CliRunner().invoke(convert_command, [*arguments, *options]).exit_code == 0
    info = read_gguf_info(tmp_path / "out.gguf")
    assert info.tensor("output.weight").shape[1] == 64
    assert info.tensor("token_embd.weight").shape[1] == VOCAB


# On the demo pair: trained, so that drafts and acceptance mean something.


@pytest.fixture(scope="module")
def corpus(tmp_path_factory, demo) -> Path:
    """Text that the prompts used below are not part of."""
    path = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    path.write_text("\n".join(demo.prompts[8:]), encoding="utf-8")
    return path


@pytest.fixture(scope="module", params=["v2", "v1"])
def checkpoint(request, drafter_dir, drafter_v1_dir) -> Path:
    return {"v2": drafter_dir, "v1": drafter_v1_dir}[request.param]


def run(target: Path, drafter: Path, prompts: list[str], n_tokens: int = 100) -> tuple[list, list, list]:
    """Tokens without drafting, tokens with it, and its cycles."""
    options = {"n_ctx": 512, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
    llm = DFlashLlama(target, drafter, depth=None, auto_disable=False, **options)
    depth, cycles, outputs = llm.depth, [], {}
    llm.on_cycle = cycles.append
    for llm.depth in (0, depth):
        cycles.clear()
        outputs[llm.depth] = [generate(llm, prompt, n_tokens) for prompt in prompts]
    llm.close()
    return outputs[0], outputs[depth], cycles


def generate(llm: DFlashLlama, prompt: str, n_tokens: int) -> list[int]:
    llm.reset()
    stream = llm.generate(llm.tokenize(prompt.encode()), temp=0.0)
    tokens = [next(stream) for _ in range(n_tokens)]
    stream.close()
    return tokens


@pytest.mark.parametrize("size", [DEMO_TOP_K, 96])
def test_output_stays_the_targets_and_only_kept_tokens_are_proposed(tmp_path, demo, checkpoint, corpus, size):
    vocabulary = DraftVocabulary(size, (corpus,))
    done = convert(checkpoint, demo.target, tmp_path / "out.gguf", outtype="f32", draft_vocab=vocabulary)
    plain, drafted, cycles = run(demo.target, done.output, list(demo.prompts[:4]))
    assert drafted == plain
    kept = set(kept_tokens(done.output))
    assert len(kept) == size
    assert {token for cycle in cycles for token in cycle.proposal} <= kept
    assert not {token for output in plain for token in output} <= kept
    assert sum(cycle.accepted for cycle in cycles) > 0.3 * len(cycles)


@pytest.mark.parametrize(
    "options", [{"draft_vocab": True}, {"embed_target_head": True}, {"draft_vocab": True, "embed_target_head": True}]
)
def test_a_whole_vocabulary_and_copied_tables_draft_exactly_as_shared_ones(
    tmp_path, demo, checkpoint, corpus, n_vocab, options
):
    options = dict(options)
    if options.get("draft_vocab"):
        options["draft_vocab"] = DraftVocabulary(n_vocab, (corpus,))
    shared = convert(checkpoint, demo.target, tmp_path / "shared.gguf", outtype="f32").output
    carried = convert(checkpoint, demo.target, tmp_path / "carried.gguf", outtype="f32", **options).output
    prompts = list(demo.prompts[:3])
    assert run(demo.target, carried, prompts) == run(demo.target, shared, prompts)


# Files that llama.cpp would end the process over.


def broken(tmp_path: Path, target: Path, tensors: dict) -> Path:
    good = trimmed(target, tmp_path, 8, {5: 1}).output
    return changed_gguf(good, tmp_path / "broken.gguf", tensors)


def test_json_keys_may_come_in_any_order(tmp_path, target):
    path = tmp_path / "counts.json"
    path.write_text(json.dumps({"40": 1, "39": 2}))
    assert count_tokens([path], target, VOCAB)[[39, 40]].tolist() == [2, 1]
