"""What a callback may not do, and what a call that failed or was interrupted leaves behind: nothing."""

import threading

import pytest
from llama_cpp import LogitsProcessorList, StoppingCriteriaList

from dflash2.errors import Dflash2Error, NativeError

SENTENCE = "within a callback"
CALLS = {
    "reset": lambda llama: llama.reset(),
    "eval": lambda llama: llama.eval([9, 8]),
    "sample": lambda llama: llama.sample(),
    "generate": lambda llama: next(llama.generate([9, 8, 7])),
    "save_state": lambda llama: llama.save_state(),
    "depth": lambda llama: setattr(llama, "depth", 3),
    "close": lambda llama: llama.close(),
}


@pytest.fixture
def tokens(fresh, prompts):
    return fresh(depth=0).tokenize(prompts[1].encode())


def taken(llama, tokens, n=40, **options):
    llama.set_seed(5)
    stream = llama.generate(tokens, **options)
    found = [token for _, token in zip(range(n), stream, strict=False)]
    stream.close()
    return found


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("at", [1, 2, 9])
@pytest.mark.parametrize("where", ["on_cycle", "processor", "criteria"])
def test_a_callback_is_refused_what_would_change_the_memories(fresh, tokens, where, call, at):
    llama, refused, calls = fresh(), [], [0]

    def callback(*_):
        calls[0] += 1
        if calls[0] == at:
            try:
                call(llama)
            except Dflash2Error as error:
                refused.append(str(error))

    options = {"temp": 0.8}
    if where == "on_cycle":
        llama.on_cycle = callback
    elif where == "processor":
        options["logits_processor"] = LogitsProcessorList([lambda _ids, scores: (callback(), scores)[1]])
    else:
        options["stopping_criteria"] = StoppingCriteriaList([lambda *_: bool(callback())])
    text = taken(llama, tokens, **options)
    assert [SENTENCE in sentence for sentence in refused] == [True]
    llama.on_cycle = None
    assert text == taken(fresh(depth=0), tokens, temp=0.8)


@pytest.mark.parametrize("n", range(1, 9))
def test_a_refused_batch_leaves_the_present_logits(fresh, tokens, n):
    llama, other = fresh(), fresh(depth=0)
    expected = taken(other, tokens, n + 1, temp=0.0)
    for broken in ([-1], [10**6], [2**31]):
        assert taken(llama, tokens, n, temp=0.0) == expected[:n]
        with pytest.raises(NativeError):
            llama.eval(broken)
        assert llama.sample(temp=0.0) == expected[n - 1]
    stream = llama.generate(tokens, temp=0.0)
    next(stream)
    with pytest.raises(NativeError):
        stream.send([10**6])
    assert taken(llama, tokens, n, temp=0.0) == expected[:n]


@pytest.mark.parametrize("depth", [0, 7, "auto"])
@pytest.mark.parametrize("chosen", ["target", "drafter"])
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_prompt_can_be_tried_again_after_an_interrupt(fresh, tokens, depth, chosen, nth):
    llama = fresh(depth=depth)
    expected = taken(fresh(depth=0), tokens, temp=0.0)
    context = getattr(llama._session, chosen)
    decode, calls = context._decode, [0]

    def interrupted(*arguments):
        status = decode(*arguments)
        calls[0] += 1
        if calls[0] == nth:
            raise KeyboardInterrupt  # as a signal would, which Python handles when the call is over
        return status

    context._decode = interrupted
    try:
        taken(llama, tokens, temp=0.0)
    except KeyboardInterrupt:
        pass
    else:
        assert (depth, chosen) == (0, "drafter")
    context._decode = decode
    state = llama.save_state()
    assert taken(llama, tokens, temp=0.0) == expected
    llama.load_state(state)
    assert taken(llama, tokens, temp=0.0) == expected


def test_an_interrupt_while_a_prefix_is_cut_leaves_it_usable(fresh, tokens):
    llama = fresh()
    expected = taken(fresh(depth=0), tokens, temp=0.0)
    taken(llama, tokens, temp=0.0)
    reuse = llama._session.reuse

    def interrupted(prefix):
        reuse(prefix)
        raise KeyboardInterrupt

    llama._session.reuse = interrupted
    with pytest.raises(KeyboardInterrupt):
        taken(llama, tokens, temp=0.0)
    llama._session.reuse = reuse
    assert taken(llama, tokens, temp=0.0) == expected


def test_statistics_can_be_read_while_another_thread_generates(fresh, tokens):
    llama, ended, problems = fresh(), threading.Event(), []

    def read():
        while not ended.is_set():
            try:
                stats = llama.stats
                assert sum(stats.accepted_at) == stats.accepted
            except Exception as error:
                problems.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    for seed in range(3):
        llama.set_seed(seed)
        taken(llama, tokens[seed:], 60, temp=1.0)
    ended.set()
    reader.join()
    assert problems == []
