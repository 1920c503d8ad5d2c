"""A request whose history diverges begins at the nearest checkpoint, with both memories as if nothing else had been."""

import numpy as np
import pytest
from factories_targets import VOCAB, make_kind, random_drafter
from generation import take_greedy as take
from llama_cpp import Llama, llama_get_logits

from dflash2 import Dflash2Error, DFlashLlama
from dflash2.converter import convert
from dflash2.runtime.checkpoints import Checkpoint, CheckpointLimits, Checkpoints

# Fewer than 64 rows a batch: from there on the CPU's flash attention adds up in another order, and how a prompt is cut
# into batches (by checkpoints, too) decides near-ties, in plain Llama as well.
EXACT = {"n_ctx": 1024, "n_batch": 48, "n_threads": 1, "n_threads_batch": 1, "flash_attn": True, "verbose": False}
STEP = 100
N_TOKENS = 40
rng = np.random.default_rng(5)
FIRST = rng.integers(40, 240, 300).tolist()  # the prompt of the first turn
SECOND = rng.integers(40, 240, 30).tolist()  # what the user adds in the second
# Kinds whose memory forgets, and one whose drafter alone does.
FORGETFUL = {
    "qwen35": {},
    "lfm2": {},
    "nemotron_h": {},
    "qwen3next": {},
    "gemma4": {"swa_full": False},
    "gpt-oss": {"swa_full": False},
}
WINDOWED = ("gemma4", "gpt-oss")  # these reach back some way without a checkpoint


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """(target, drafter) of a kind; the drafter's window is 32 positions, in every layer unless told otherwise."""
    folder = tmp_path_factory.mktemp("pairs")

    def make(kind, layers=("sliding", "sliding")):
        target, drafter = folder / f"{kind}.gguf", folder / f"{kind}-{'-'.join(layers)}.gguf"
        if not target.exists():
            make_kind(target, kind)
        if not drafter.exists():
            checkpoint = random_drafter(folder / drafter.stem, layer_types=[f"{layer}_attention" for layer in layers])
            convert(checkpoint, target, drafter, outtype="f32")
        return target, drafter

    return make


def open_pair(pair, kind, *layers, **options):
    return DFlashLlama(
        *pair(kind, layers or ("sliding", "sliding")),
        depth=None,
        auto_disable=False,
        checkpoint_min_step=STEP,
        **{**EXACT, **FORGETFUL.get(kind, {}), **options},
    )


def assert_as_fresh(llama, target, kind, tokens):
    """`llama` continues `tokens` as plain Llama with empty memory does."""
    plain = Llama(str(target), **{**EXACT, **FORGETFUL[kind]})
    if kind not in WINDOWED:
        assert take(llama, tokens, N_TOKENS) == take(plain, tokens, N_TOKENS)
    else:  # a windowed cache is a ring, whose order decides in which order attention adds up: logits are close only
        take(llama, tokens, 1)
        plain.eval(tokens)
        logits = np.ctypeslib.as_array(llama_get_logits(plain._ctx.ctx), shape=(VOCAB,))
        assert np.abs(llama._session.target.logits()[-1] - logits).max() < 0.05
    plain.close()


def proposals(llama, tokens, n):
    """What is drafted in `n` cycles after `tokens`."""
    records = []
    llama.on_cycle = records.append
    take(llama, tokens, 3 * n)
    llama.on_cycle = None
    return [record.proposal for record in records[:n]]


@pytest.mark.parametrize("kind", FORGETFUL)
def test_a_history_without_the_answer_begins_near_the_end_of_the_first_prompt(pair, kind):
    llama = open_pair(pair, kind)
    answer = take(llama, FIRST, 60)
    llama.reset_stats()
    second = [*FIRST, 50, *answer[40:], *SECOND]  # 50 is never said; what came before the 40th token is stripped
    assert_as_fresh(llama, pair(kind)[0], kind, second)
    evaluated = len(second) - len(FIRST)
    assert llama.stats.prompt_tokens == evaluated + (0 if kind in WINDOWED else 4)
    llama.close()


@pytest.mark.parametrize("kind", FORGETFUL)
def test_an_edit_begins_at_the_last_checkpoint_before_it(pair, kind):
    llama = open_pair(pair, kind)
    take(llama, FIRST, 20)
    edited = [*FIRST[:250], 77, *FIRST[251:]]
    for at, tokens in ((250, edited), (130, [*FIRST[:130], 78, *FIRST[131:]]), (50, [*FIRST[:50], 79, *FIRST[51:]])):
        llama.reset_stats()
        assert_as_fresh(llama, pair(kind)[0], kind, tokens)
        if kind not in WINDOWED or at == 50:
            assert llama.stats.prompt_tokens == len(FIRST) - at // STEP * STEP
    llama.close()


@pytest.mark.parametrize(
    ("kind", "layers"),
    [
        *((kind, ("sliding", "sliding")) for kind in (*FORGETFUL, "llama")),
        *((kind, layers) for kind in ("lfm2", "llama") for layers in (("full", "full"), ("sliding", "full"))),
    ],
)
def test_the_drafter_is_as_if_the_discarded_answer_had_never_been(pair, kind, layers):
    llama, fresh = open_pair(pair, kind, *layers), open_pair(pair, kind, *layers)
    take(llama, FIRST, 400)  # the window of 32 positions moves far beyond the prompt
    second = [*FIRST[: len(FIRST) - 2], *SECOND[:6]]
    assert proposals(llama, second, 5) == proposals(fresh, second, 5)
    llama.close()
    fresh.close()


@pytest.mark.parametrize("layers", [("sliding", "sliding"), ("sliding", "full")])
def test_a_drafter_that_was_off_in_between_gets_no_window_that_lacks_its_rest(pair, layers):
    llama, plain = open_pair(pair, "lfm2", *layers), Llama(str(pair("lfm2")[0]), **EXACT)
    depth = llama.depth
    take(llama, FIRST, 100)
    llama.depth = 0
    off = FIRST + SECOND
    assert take(llama, off, 20) == take(plain, off, 20)
    llama.depth = depth
    again = FIRST[:290] + SECOND
    assert take(llama, again, 60) == take(plain, again, 60)
    assert llama.stats.cycles > 0
    llama.close()
    plain.close()


def test_without_checkpoints_everything_is_evaluated_again(pair):
    llama = open_pair(pair, "qwen35", ctx_checkpoints=0)
    take(llama, FIRST, 60)
    llama.reset_stats()
    take(llama, FIRST + SECOND, 5)
    assert llama.stats.prompt_tokens == len(FIRST + SECOND)
    llama.close()


def test_a_long_answer_leaves_checkpoints_too(pair):
    llama = open_pair(pair, "lfm2")
    answer = take(llama, FIRST, 260)
    llama.reset_stats()
    take(llama, [*FIRST, *answer[:230], 90, 91], 5)
    assert llama.stats.prompt_tokens < 130 + 2  # of 532
    llama.close()


def test_a_state_that_was_loaded_takes_no_checkpoint_of_before(pair):
    llama = open_pair(pair, "qwen35")
    other = rng.integers(40, 240, 300).tolist()
    take(llama, other, 10)
    state = llama.save_state()
    take(llama, FIRST, 10)
    llama.load_state(state)
    plain = Llama(str(pair("qwen35")[0]), **EXACT)
    second = other[:298] + SECOND
    assert take(llama, second, 30) == take(plain, second, 30)
    llama.close()
    plain.close()


def checkpoint(length, n_bytes=10):
    return Checkpoint(length, np.zeros(n_bytes, np.uint8), None)


def lengths(checkpoints):
    return [length for length in range(2000) if (near := checkpoints.nearest(length)) and near.length == length]


def test_the_nearest_checkpoint_is_the_longest_that_fits():
    checkpoints = Checkpoints(CheckpointLimits())
    for length in (100, 200, 300):
        checkpoints.add(checkpoint(length))
    assert checkpoints.nearest(99) is None
    assert checkpoints.nearest(299).length == 200
    assert checkpoints.nearest(1000).length == 300
    checkpoints.drop_beyond(200)
    assert lengths(checkpoints) == [100, 200]


def test_the_one_closest_to_its_predecessor_makes_room_but_never_the_newest():
    checkpoints = Checkpoints(CheckpointLimits(count=3))
    for length in (100, 500, 550, 900, 901):
        checkpoints.add(checkpoint(length))
    assert lengths(checkpoints) == [500, 900, 901]


def test_checkpoints_take_no_more_bytes_than_allowed():
    checkpoints = Checkpoints(CheckpointLimits(count=100, bytes=35))
    for length in range(100, 1100, 100):
        checkpoints.add(checkpoint(length))
        assert checkpoints.nbytes <= 35
    assert len(checkpoints) == 3
    checkpoints.add(checkpoint(1200, n_bytes=36))
    assert lengths(checkpoints)[-1] == 1000


@pytest.mark.parametrize("limits", [{"count": -1}, {"step": 0}, {"bytes": -5}])
def test_limits_that_make_no_sense_are_refused(limits):
    with pytest.raises(Dflash2Error, match="checkpoints need"):
        CheckpointLimits(**limits)
