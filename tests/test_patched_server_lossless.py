"""At temperature 0 a drafting llama-server gives the text of one that does not, whatever its memory goes through."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from server_pair import open_llama

from dflash2.converter import convert

N_TOKENS = 120
GREEDY = {"temperature": 0.0, "cache_prompt": True}
WIDE = ("--parallel", "4", "--ctx-size", "2048")


@pytest.fixture(scope="module")
def tokens_of(target_path, exact_drafters, prompts):
    llm = open_llama(target_path, exact_drafters["v2"])
    yield [llm.tokenize(text.encode()) for text in prompts]
    llm.close()


def acceptance(answers):
    """Share of the drafts that were accepted."""
    timings = [answer["timings"] for answer in answers]
    drafted, accepted = (sum(t.get(key, 0) for t in timings) for key in ("draft_n", "draft_n_accepted"))
    return accepted / max(drafted, 1)


def fresh(server, prompt, n=N_TOKENS):
    """What the server generates after a prompt that it evaluates as a whole."""
    return server.answer(prompt, n, temperature=0.0)


@pytest.mark.parametrize("version", ["v2", "v1"])
def test_slots_that_want_different_numbers_of_drafts(serve, exact_drafters, tokens_of, version):
    requests = [(prompt, 1 + 7 * n % 50) for n, prompt in enumerate(tokens_of[:24])]
    with serve() as plain:
        expected = [fresh(plain, *request)["tokens"] for request in requests]
    with serve(exact_drafters[version], *WIDE) as server, ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda request: fresh(server, *request), requests))
    assert [answer["tokens"] for answer in answers] == expected
    assert acceptance(answers) > 0.2


def test_a_second_request_continues_changes_or_repeats_the_first(serve, exact_drafters, tokens_of):
    with serve() as plain, serve(exact_drafters["v2"]) as server:
        for prompt, other in zip(tokens_of[:6:2], tokens_of[1:6:2], strict=True):
            first = server.answer(prompt, N_TOKENS, **GREEDY)
            history = prompt + first["tokens"]
            assert first["tokens"] == fresh(plain, prompt)["tokens"]
            for following in (history + other, history[: len(prompt) + 40] + other[:20], prompt, history[:-1]):
                again = server.answer(following, 60, **GREEDY)
                assert again["tokens"] == fresh(plain, following, 60)["tokens"]
                assert again["timings"]["cache_n"] > 0


def test_a_prompt_restored_from_the_cache_drafts_as_it_did(serve, exact_drafters, tokens_of):
    """Three histories take turns in one slot; each is put away for the next one and fetched again."""
    histories = tokens_of[:3]
    with serve() as plain, serve(exact_drafters["v2"], "--cache-ram", "256") as server:
        for turn in range(3):
            for n, history in enumerate(histories):
                answer = server.answer(history, 60, **GREEDY)
                assert answer["tokens"] == fresh(plain, history, 60)["tokens"]
                whole = fresh(server, history, 60)
                assert acceptance([answer]) > 0.8 * acceptance([whole])
                if turn:
                    assert answer["timings"]["cache_n"] > len(history) - 30
                histories[n] = history + answer["tokens"] + tokens_of[10 + n][:20]


def test_a_slot_restored_from_a_file(serve, exact_drafters, tokens_of, tmp_path):
    short, long = tokens_of[0][:10], tokens_of[1] + tokens_of[2] + tokens_of[3]
    with serve() as plain, serve(exact_drafters["v2"], "--slot-save-path", str(tmp_path)) as server:
        for name, prompt in (("short", short), ("long", long)):
            server.answer(prompt, 20, **GREEDY)
            server.post("/slots/0?action=save", {"filename": name})
        for before, restored, prompt in ((short, "long", long), (long, "short", short)):
            server.answer(before, 3, **GREEDY)
            server.post("/slots/0?action=restore", {"filename": restored})
            following = prompt + tokens_of[4][:5]
            answer = server.answer(following, N_TOKENS, **GREEDY)
            assert answer["tokens"] == fresh(plain, following)["tokens"]
            assert answer["timings"]["cache_n"] > 0
            assert acceptance([answer]) > 0.8 * acceptance([fresh(server, following)])
        (tmp_path / "long..draft").unlink()
        server.answer(short, 3, **GREEDY)
        server.post("/slots/0?action=restore", {"filename": "long"})
        assert server.answer(long, N_TOKENS, **GREEDY)["tokens"] == fresh(plain, long)["tokens"]


@pytest.mark.parametrize("drafts", [True, False])
def test_a_request_that_names_a_busy_slot_leaves_it_alone(serve, exact_drafters, tokens_of, drafts):
    """It waits for the slot, whose memory the prompt cache must not take away meanwhile."""
    first, second = tokens_of[0], tokens_of[1]
    options = {"temperature": 0.0, "id_slot": 0, "cache_prompt": True, "return_tokens": True}
    with serve() as plain, serve(exact_drafters["v2"] if drafts else None, "--cache-ram", "64") as server:
        server.post("/completion", {**options, "prompt": second, "n_predict": 20})  # then put away for the first
        running = server.stream("/completion", {**options, "prompt": first, "n_predict": 300, "stream": True})
        tokens = next(running)["tokens"]
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(server.post, "/completion", {**options, "prompt": second, "n_predict": 20})
            tokens += [token for event in running for token in event["tokens"]]
            assert waiting.result()["tokens"] == fresh(plain, second, 20)["tokens"]
        assert tokens == fresh(plain, first, 300)["tokens"]


def test_the_context_is_shifted(serve, exact_drafters, tokens_of):
    shifted = ("--context-shift", "--ctx-size", "256")
    with serve(None, *shifted) as plain, serve(exact_drafters["v2"], *shifted) as server:
        for prompt in tokens_of[:3]:
            answer = fresh(server, prompt, 700)
            assert answer["tokens"] == fresh(plain, prompt, 700)["tokens"]
            assert answer["truncated"]
            assert acceptance([answer]) > 0.2


def test_a_drafter_in_q4_k(serve, demo, tokens_of, tmp_path):
    drafter = tmp_path / "drafter.gguf"
    convert(demo.drafter, demo.target, drafter, outtype="q4_k_m")
    with serve() as plain, serve(drafter, *WIDE) as server, ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda prompt: fresh(server, prompt), tokens_of[:8]))
        assert [answer["tokens"] for answer in answers] == [fresh(plain, p)["tokens"] for p in tokens_of[:8]]
    assert acceptance(answers) > 0.2
