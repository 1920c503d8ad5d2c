"""One object and many threads: calls queue, the newest generation is the one alive, nothing is left behind."""

import gc
import signal
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
from generation import EXACT
from llama_cpp import Llama, LogitsProcessorList, StoppingCriteriaList

from dflash2 import Dflash2Error, DFlashLlama
from dflash2.errors import NativeError

GREEDY = {"max_tokens": 40, "temperature": 0.0}


def text_of(stream):
    return "".join(chunk["choices"][0]["text"] for chunk in stream)


@pytest.fixture(scope="module")
def llama(target_path, drafter_gguf):
    made = DFlashLlama(target_path, drafter_gguf, depth=None, auto_disable=False, **EXACT)
    yield made
    made.close()


@pytest.fixture(scope="module")
def expected(target_path, prompts):
    """Plain Llama's greedy answer to each of eight prompts."""
    plain = Llama(str(target_path), **EXACT)
    texts = [plain(prompt, **GREEDY)["choices"][0]["text"] for prompt in prompts[:8]]
    plain.close()
    return texts


def test_concurrent_calls_queue_and_each_gets_its_own_answer(llama, prompts, expected):
    def ask(i):
        return llama(prompts[i], **GREEDY)["choices"][0]["text"]

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(8))) == expected
        assert list(pool.map(ask, [0, 0, 1, 1, 0, 0])) == [expected[i] for i in (0, 0, 1, 1, 0, 0)]


def test_a_stream_may_hop_threads(llama, prompts, expected):
    stream = llama(prompts[0], stream=True, **GREEDY)
    texts = []
    for _ in range(100):
        with ThreadPoolExecutor(1) as pool:
            chunk = pool.submit(next, stream, None).result()
        if chunk is None:
            break
        texts.append(chunk["choices"][0]["text"])
    assert "".join(texts) == expected[0]


def test_an_abandoned_stream_is_superseded_and_ends(llama, prompts, expected):
    abandoned = llama(prompts[0], stream=True, **GREEDY)
    begun = next(abandoned)["choices"][0]["text"] + next(abandoned)["choices"][0]["text"]
    assert llama(prompts[1], **GREEDY)["choices"][0]["text"] == expected[1]
    assert list(abandoned) == []
    assert expected[0].startswith(begun)
    assert llama(prompts[2], **GREEDY)["choices"][0]["text"] == expected[2]


def test_a_superseded_stream_leaves_a_newer_one_alone(llama, prompts, expected):
    old = llama(prompts[0], stream=True, logprobs=1, **GREEDY)
    next(old)
    new = llama(prompts[1], stream=True, **GREEDY)
    begun = next(new)["choices"][0]["text"]
    assert next(old, None) is None
    del old
    gc.collect()
    assert begun + text_of(new) == expected[1]


def test_a_superseded_generator_of_tokens_ends(llama, prompts):
    first = llama.generate(llama.tokenize(prompts[0].encode()), temp=0.0)
    next(first)
    second = llama.generate(llama.tokenize(prompts[1].encode()), temp=0.0)
    next(second)
    with pytest.raises(StopIteration):
        next(first)
    assert isinstance(next(second), int)
    second.close()


def test_a_generator_that_was_never_started_supersedes_nothing(llama, prompts, expected):
    stream = llama(prompts[3], stream=True, **GREEDY)
    begun = next(stream)["choices"][0]["text"]
    llama.generate([1, 2, 3], temp=0.0)
    llama(prompts[1], stream=True, **GREEDY)
    assert begun + text_of(stream) == expected[3]


def test_streams_from_many_threads_are_whole_or_a_beginning(llama, prompts, expected):
    def ask(i):
        return i, text_of(llama(prompts[i], stream=True, **GREEDY))

    with ThreadPoolExecutor(4) as pool:
        for i, text in pool.map(ask, list(range(8)) * 2):
            assert expected[i].startswith(text)
    assert llama(prompts[5], **GREEDY)["choices"][0]["text"] == expected[5]


def test_a_state_saved_within_a_block_restores_and_the_stream_goes_on(llama, prompts, expected):
    for chunks in (1, 2, 3, 5, 6):
        stream = llama(prompts[4], stream=True, **GREEDY)
        begun = "".join(next(stream)["choices"][0]["text"] for _ in range(chunks))
        state = llama.save_state()
        assert begun + text_of(stream) == expected[4]
        llama(prompts[5], max_tokens=5, temperature=0.0)
        llama.load_state(state)
        tokens = llama.tokenize(prompts[4].encode())
        assert llama.n_tokens >= len(tokens)
        assert llama(prompts[4], **GREEDY)["choices"][0]["text"] == expected[4]


def test_depth_may_change_within_a_stream(llama, prompts, expected):
    stream = llama(prompts[6], stream=True, **GREEDY)
    begun = ""
    for depth in (3, 0, 7, 1, 7):
        begun += next(stream)["choices"][0]["text"] + next(stream)["choices"][0]["text"]
        llama.depth = depth
    assert begun + text_of(stream) == expected[6]


@pytest.mark.parametrize("where", ["on_cycle", "criterion", "processor-free stream"])
def test_an_interrupt_leaves_a_usable_object(llama, prompts, expected, where):
    calls = iter(range(100))

    def interrupt(*_):
        if next(calls) == 6:
            raise KeyboardInterrupt
        return False

    arguments = dict(GREEDY)
    if where == "criterion":
        arguments["stopping_criteria"] = StoppingCriteriaList([interrupt])
    elif where == "on_cycle":
        llama.on_cycle = interrupt
    try:
        with pytest.raises(KeyboardInterrupt):
            for _ in llama(prompts[7], stream=True, **arguments):
                if where.endswith("stream"):
                    interrupt()
    finally:
        llama.on_cycle = None
    assert llama(prompts[7], **GREEDY)["choices"][0]["text"] == expected[7]
    assert llama(prompts[0], **GREEDY)["choices"][0]["text"] == expected[0]


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no interval timers here")
def test_signals_at_any_moment_leave_a_usable_object(llama, prompts, expected):
    interrupted = 0
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for microseconds in range(500, 60_000, 2_300):
            signal.setitimer(signal.ITIMER_REAL, microseconds / 1e6)
            try:
                llama(prompts[2], **GREEDY)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                interrupted += 1
            short = llama(prompts[3], max_tokens=12, temperature=0.0)["choices"][0]["text"]
            assert len(short) > 3
            assert expected[3].startswith(short)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupted > 0
    assert llama(prompts[2], **GREEDY)["choices"][0]["text"] == expected[2]


def test_calls_from_a_callback_in_mid_cycle_are_refused_with_a_sentence(llama, prompts, expected):
    attempts = {
        "save": llama.save_state,
        "reset": llama.reset,
        "eval": lambda: llama.eval([5]),
        "generate": lambda: next(llama.generate([5], temp=0.0)),
        "request": lambda: llama("x", max_tokens=2),
        "depth": lambda: setattr(llama, "depth", 2),
    }
    seen = {}

    def call(_):
        for name, attempt in attempts.items():
            try:
                attempt()
            except Dflash2Error as error:
                seen.setdefault(name, str(error))

    llama.on_cycle = call
    assert llama(prompts[0], **GREEDY)["choices"][0]["text"] == expected[0]
    llama.on_cycle = None
    assert seen.keys() == attempts.keys()
    assert "between tokens" in seen["save"]
    assert "another request" in seen["request"]
    assert llama(prompts[1], **GREEDY)["choices"][0]["text"] == expected[1]


def test_closing_during_a_stream_ends_it(target_path, drafter_gguf, prompts):
    llama = DFlashLlama(target_path, drafter_gguf, **EXACT)
    stream = llama(prompts[0], stream=True, **GREEDY)
    next(stream)
    closer = threading.Thread(target=llama.close)
    closer.start()
    closer.join()
    assert list(stream) == []
    with pytest.raises(NativeError, match="closed"):
        llama(prompts[0], **GREEDY)


def test_a_processor_sees_every_token_while_others_wait(llama, prompts, expected):
    lengths = []

    def watch(ids, scores):
        lengths.append(len(ids))
        return scores

    def ask():
        return llama(prompts[1], logits_processor=LogitsProcessorList([watch]), **GREEDY)["choices"][0]["text"]

    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(lambda: llama(prompts[0], **GREEDY)["choices"][0]["text"])
        assert pool.submit(ask).result() == expected[1]
        assert other.result() == expected[0]
    assert lengths == list(range(lengths[0], lengths[0] + len(lengths)))


ROUNDS = """
import ctypes, gc, re, sys
from dflash2 import DFlashLlama

def resident():
    gc.collect()
    if hasattr(ctypes.CDLL(None), "malloc_trim"):
        ctypes.CDLL(None).malloc_trim(0)  # what is free inside the heap is not left behind
    with open("/proc/self/status") as file:
        return int(re.search(r"RssAnon:\\s+(\\d+) kB", file.read())[1]) << 10

def round_():
    llama = DFlashLlama(sys.argv[1], sys.argv[2], n_ctx=256, n_batch=64, n_threads=1, n_threads_batch=1, verbose=False)
    stream = llama("def f(", max_tokens=12, temperature=0.0, stream=True)
    next(stream)
    llama.close()
    assert list(stream) == []

for _ in range(20):
    round_()
begin = resident()
for _ in range(200):
    round_()
print(resident() - begin)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_two_hundred_objects_leave_no_memory_behind(target_path, drafter_gguf):
    done = subprocess.run(
        [sys.executable, "-c", ROUNDS, str(target_path), str(drafter_gguf)], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 2 << 20  # one object takes more than 24 MiB


def test_an_object_nobody_holds_is_freed_at_once(target_path, drafter_gguf):
    llama = DFlashLlama(target_path, drafter_gguf, **EXACT)
    stream = llama("def f(", max_tokens=12, temperature=0.0, stream=True)
    next(stream)
    watched = weakref.ref(llama)
    gc.disable()
    try:
        del llama, stream
        assert watched() is None
    finally:
        gc.enable()
