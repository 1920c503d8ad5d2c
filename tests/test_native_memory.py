"""Memories that forget: what a context can step back to, and what its saved part brings back."""

import numpy as np
import pytest
from factories_targets import CYCLE, RECURRENT, WINDOW, make_kind

from dflash2 import native
from dflash2.constants import SNAPSHOT_ARCHITECTURES
from dflash2.errors import NativeError
from dflash2.native import Context, ContextOptions, Model, Outputs, Placement
from dflash2.native.devices import device_array
from dflash2.native.symbols import SYMBOLS

SNAPSHOTS = 3
OPTIONS = ContextOptions(n_ctx=512, n_batch=64, n_ubatch=64, n_threads=1, n_threads_batch=1, n_rs_seq=SNAPSHOTS)
TOKENS = np.array([*range(50, 90), *CYCLE] * 8, np.int32)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    native.silence()
    folder = tmp_path_factory.mktemp("models")
    made = {}

    def model(kind):
        if kind not in made:
            made[kind] = Model(make_kind(folder / f"{kind}.gguf", kind), Placement())
        return made[kind]

    yield model
    for opened in made.values():
        opened.close()


@pytest.fixture
def context(models):
    opened = []

    def make(kind):
        opened.append(Context.open(models(kind), OPTIONS))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


def feed(context, start, stop):
    """Evaluate TOKENS[start:stop] in one batch; the logits after them."""
    for first in range(start, stop, 64):
        context.decode_tokens(TOKENS[first : min(first + 64, stop)], first, Outputs.LAST)
    return context.logits()[0].copy()


WITH_SNAPSHOTS = [kind for kind in RECURRENT if kind in SNAPSHOT_ARCHITECTURES]


@pytest.mark.parametrize("kind", WITH_SNAPSHOTS)
def test_a_recurrent_state_steps_back_within_the_rows_of_its_last_decode(context, kind):
    one, fresh = context(kind), context(kind)
    feed(one, 0, 20)
    feed(one, 20, 23)
    assert not one.truncate(20)  # a snapshot of 3 tokens ago was written by the decode before, not by this one
    assert not one.truncate(19)
    assert one.truncate(21)
    assert not one.truncate(20)  # once per decode
    np.testing.assert_array_equal(feed(one, 21, 30), feed(fresh, 0, 30))


@pytest.mark.parametrize("kind", WITH_SNAPSHOTS)
def test_a_recurrent_state_steps_back_by_no_more_than_its_snapshots(context, kind):
    one = context(kind)
    feed(one, 0, 20)
    assert not one.truncate(20 - SNAPSHOTS - 1)
    assert one.truncate(20 - SNAPSHOTS)


@pytest.mark.parametrize("kind", RECURRENT)
def test_what_is_beyond_the_end_or_everything_can_always_be_dropped(context, kind):
    one, fresh = context(kind), context(kind)
    feed(one, 0, 20)
    assert one.truncate(20)
    assert one.truncate(400)
    assert one.truncate(0)
    np.testing.assert_array_equal(feed(one, 0, 9), feed(fresh, 0, 9))


@pytest.mark.parametrize("kind", [*RECURRENT, "gpt-oss"])
def test_a_saved_part_brings_back_what_the_memory_forgot(context, kind):
    one, fresh = context(kind), context(kind)
    feed(one, 0, 60)
    part = one.save_part()
    feed(one, 60, 360)
    assert kind == "gpt-oss" or not one.truncate(60)
    one.restore_part(part, 60)
    fresh_logits = (feed(fresh, 0, 60), feed(fresh, 60, 80))[1]
    np.testing.assert_array_equal(feed(one, 60, 80), fresh_logits)


@pytest.mark.parametrize("kind", WITH_SNAPSHOTS)
def test_a_saved_part_is_of_the_state_that_was_stepped_back_to(context, kind):
    one, fresh = context(kind), context(kind)
    feed(one, 0, 60)
    assert one.truncate(58)
    part = one.save_part()
    feed(one, 58, 100)
    one.restore_part(part, 58)
    fresh_logits = (feed(fresh, 0, 58), feed(fresh, 58, 70))[1]
    np.testing.assert_array_equal(feed(one, 58, 70), fresh_logits)


@pytest.mark.parametrize("kind", WITH_SNAPSHOTS)
def test_a_restored_state_cannot_step_back(context, kind):
    one = context(kind)
    feed(one, 0, 60)
    one.restore_part(one.save_part(), 60)
    assert not one.truncate(59)
    assert one.truncate(60)


def test_a_recurrent_part_is_much_smaller_than_the_whole(context):
    one = context("lfm2")
    feed(one, 0, 300)
    assert one.save_part().nbytes < one.save().nbytes / 10


def test_sliding_layers_forget_what_lies_before_their_window(context):
    one = context("gpt-oss")
    assert one.window == WINDOW
    feed(one, 0, 40)
    assert all(one.reaches(length) for length in (0, 1, 39, 40))
    feed(one, 40, 380)
    assert one.reaches(380)
    assert one.reaches(0)
    assert not one.reaches(40)


def test_a_part_that_is_cut_short_is_refused(context):
    one = context("lfm2")
    feed(one, 0, 20)
    with pytest.raises(NativeError, match="does not fit"):
        one.restore_part(one.save_part()[:50], 20)


@pytest.mark.parametrize(("name", "says"), [("CUDA77", "no device 'CUDA77'"), ("CPU", "nothing is offloaded to 'CPU'")])
def test_a_device_that_takes_no_weights_is_refused_by_name(name, says):
    with pytest.raises(NativeError, match=says):
        device_array([name])


@pytest.mark.parametrize("name", SYMBOLS)
def test_a_symbol_is_known_under_its_plain_itanium_and_msvc_names(name):
    plain, itanium, msvc = SYMBOLS[name].names
    assert plain == name.replace("llama_", "dflash2_", 1)  # of dflash2.h
    assert itanium.startswith(f"_Z{len(name)}{name}P13llama_context")
    assert msvc.startswith(f"?{name}@@YA")
    assert msvc.endswith("@Z")
    assert "PEAUllama_context@@" in msvc
    # One letter (_N, I) or back reference per argument behind the context, as in the Itanium name (b, j).
    arguments = itanium.removeprefix(f"_Z{len(name)}{name}P13llama_context")
    assert msvc.split("PEAUllama_context@@")[1].rstrip("@Z").replace("_N", "b").replace("I", "j").replace("1", "b") == (
        arguments
    )
