"""The patched llama-server at its limits: small batches, a full context, logits that tie, damaged slot files."""

import json
import urllib.error
from concurrent.futures import ThreadPoolExecutor

import pytest
from gguf.constants import GGMLQuantizationType
from gguf_edit import edit_gguf, values_of
from server_pair import CONTEXT, EXACT_CACHES, open_llama

GREEDY = {"temperature": 0.0}
N_TOKENS = 60


@pytest.fixture(scope="module")
def tokens_of(target_path, exact_drafters, prompts):
    llm = open_llama(target_path, exact_drafters["v2"])
    yield [llm.tokenize(text.encode()) for text in prompts]
    llm.close()


def texts(server, prompts, n=N_TOKENS, workers=1, **options):
    """Token ids after each of the prompts, `workers` of them at once."""
    with ThreadPoolExecutor(workers) as threads:
        return list(threads.map(lambda prompt: server.answer(prompt, n, **GREEDY, **options)["tokens"], prompts))


@pytest.mark.parametrize("version", ["v2", "v1"])
@pytest.mark.parametrize(
    "options",
    [
        ("--ubatch-size", "4"),
        ("--batch-size", "8", "--ubatch-size", "2"),
        ("--parallel", "4", "--ctx-size", "2048", "--ubatch-size", "16"),
        ("--parallel", "4", "--ctx-size", "2048", "--batch-size", "16", "--ubatch-size", "16"),
        ("--ubatch-size", "4", "--spec-draft-n-max", "3", "--spec-draft-block", "8"),
    ],
    ids=["micro-batch", "batch", "slots", "slots in a batch", "block"],
)
def test_batches_smaller_than_a_draft_leave_room_for_it(serve, exact_drafters, tokens_of, version, options):
    with serve(None) as plain:
        expected = texts(plain, tokens_of[:6])
    with serve(exact_drafters[version], *options) as server:
        assert texts(server, tokens_of[:6], workers=6) == expected
        assert server.answer(tokens_of[0], N_TOKENS, **GREEDY)["timings"]["draft_n_accepted"] > 0


def test_a_drafting_request_fills_its_context_as_one_without_drafts(serve, exact_drafters, tokens_of):
    with serve(None) as plain, serve(exact_drafters["v2"]) as drafting:
        for prompt in tokens_of[:6]:
            expected, answer = (server.answer(prompt, -1, ignore_eos=True, **GREEDY) for server in (plain, drafting))
            assert len(expected["tokens"]) == CONTEXT - len(prompt)
            assert answer["tokens"] == expected["tokens"]
            assert (answer["stop_type"], answer["truncated"]) == (expected["stop_type"], expected["truncated"])
        # The slot goes on as if nothing had been.
        assert texts(drafting, tokens_of[:2]) == texts(plain, tokens_of[:2])


@pytest.fixture(scope="module")
def tying_target(target_path, tmp_path_factory):
    """The demo target, of which every second token has the logit of the one before."""
    head = values_of(target_path, "token_embd.weight").copy()  # the head too
    head[1::2] = head[::2]
    path = tmp_path_factory.mktemp("tying") / "target.gguf"
    return edit_gguf(target_path, path, tensors={"token_embd.weight": (head, GGMLQuantizationType.Q8_0)})


def test_logits_that_tie_give_one_text_with_and_without_drafts(serve, tying_target, exact_drafters, tokens_of):
    """The first of them, which is what the Python runtime takes too."""
    with serve(None, "--model", str(tying_target)) as plain:
        expected = texts(plain, tokens_of[:8])
    with serve(exact_drafters["v2"], "--model", str(tying_target)) as drafting:
        assert texts(drafting, tokens_of[:8]) == expected
    llm = open_llama(tying_target, exact_drafters["v2"], **EXACT_CACHES)
    for prompt, text in zip(tokens_of[:8], expected, strict=True):
        stream = llm.generate(prompt, temp=0.0)
        assert [next(stream) for _ in text] == text
        assert {token % 2 for token in text} == {0}
    llm.close()


def refusal(server, action, filename) -> tuple[int, str]:
    """Status and message of the error that a slot's action ends with."""
    with pytest.raises(urllib.error.HTTPError) as caught:
        server.post(f"/slots/0?action={action}", {"filename": filename})
    return caught.value.code, json.load(caught.value)["error"]["message"]


def test_no_slot_can_be_saved_as_the_drafters_part_of_another(serve, exact_drafters, tokens_of, tmp_path):
    names = {"x": tokens_of[0], "x.draft": tokens_of[1] + tokens_of[2], "x.draft.draft": tokens_of[3]}
    with serve(None) as plain, serve(exact_drafters["v2"], "--slot-save-path", str(tmp_path)) as server:
        expected = dict(zip(names, texts(plain, names.values()), strict=True))
        for name, prompt in names.items():
            server.answer(prompt, 20, **GREEDY)
            server.post("/slots/0?action=save", {"filename": name})
        for name, prompt in names.items():
            server.post("/slots/0?action=restore", {"filename": name})
            answer = server.answer(prompt, N_TOKENS, cache_prompt=True, **GREEDY)
            assert answer["tokens"] == expected[name]
            assert answer["timings"]["cache_n"] > 0
        for action in ("save", "restore"):
            assert refusal(server, action, "x..draft") == (400, "Invalid filename")


def test_damaged_slot_files_are_an_error_or_an_empty_memory(serve, exact_drafters, tokens_of, tmp_path):
    prompt, other = tokens_of[0] + tokens_of[1], tokens_of[2]
    with serve(None) as plain, serve(exact_drafters["v2"], "--slot-save-path", str(tmp_path)) as server:
        expected = dict(zip(("prompt", "other"), texts(plain, [prompt, other]), strict=True))
        server.answer(prompt, 20, **GREEDY)
        server.post("/slots/0?action=save", {"filename": "x"})
        whole, draft = (tmp_path / "x").read_bytes(), (tmp_path / "x..draft").read_bytes()
        damages = [b"", b"garbage", bytes(len(draft)), *(draft[:n] for n in (4, 12, 16, 60, len(draft) // 2))]
        flipped = [draft[:at] + b"\xff" * 4 + draft[at + 4 :] for at in range(0, 80, 4)]
        for content in (*damages, *flipped, draft + draft):
            (tmp_path / "x..draft").write_bytes(content)
            server.answer(other, 5, **GREEDY)  # the slot holds another text
            server.post("/slots/0?action=restore", {"filename": "x"})
            assert texts(server, [prompt], cache_prompt=True) == [expected["prompt"]]
        (tmp_path / "x..draft").write_bytes(draft)
        for content in (b"", b"garbage", whole[:4], whole[:16], whole[: len(whole) // 2], whole[:-1]):
            (tmp_path / "y").write_bytes(content)
            (tmp_path / "y..draft").write_bytes(draft)
            server.answer(other, 5, **GREEDY)
            status, message = refusal(server, "restore", "y")
            assert (status, message.startswith("Unable to restore slot: ")) == (400, True)
            assert texts(server, [other], cache_prompt=True) == [expected["other"]]
