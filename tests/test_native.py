"""What llama.cpp would assert, and so kill the interpreter, is a NativeError here."""

import subprocess
import sys
from pathlib import Path

import llama_cpp
import numpy as np
import pytest

from dflash2 import native
from dflash2.constants import LLAMA_CPP_PYTHON_VERSION
from dflash2.errors import NativeError
from dflash2.native import Context, ContextOptions, Model, Outputs, Placement, loader

OPTIONS = ContextOptions(n_ctx=256, n_batch=32, n_ubatch=16, n_threads=1, n_threads_batch=1)


def tokens(*ids):
    return np.array(ids, np.int32)


@pytest.fixture(scope="module")
def model(target_path):
    native.silence()
    model = Model(target_path, Placement())
    yield model
    model.close()


@pytest.fixture
def context(model):
    context = Context.open(model, OPTIONS)
    yield context
    context.close()


def test_a_tapped_layer_is_the_input_of_that_layer(context):
    context.tap([0, 3])
    context.decode_tokens(tokens(5, 6, 7), 0, Outputs.LAST)
    rows = context.layer_inputs(0, np.empty((3, 2 * context.n_embd), np.float32)).copy()
    context.clear()
    context.decode_tokens(tokens(9, 6), 0, Outputs.LAST)
    again = context.layer_inputs(1, np.empty((1, 2 * context.n_embd), np.float32))
    # Layer 0 reads the token embedding alone, layer 3 what stood before it too.
    np.testing.assert_array_equal(again[0, : context.n_embd], rows[1, : context.n_embd])
    assert not np.array_equal(again[0, context.n_embd :], rows[1, context.n_embd :])


@pytest.mark.parametrize("layer", [-1, 7, 1000])
def test_a_layer_that_the_model_lacks_cannot_be_tapped(context, layer):
    with pytest.raises(NativeError, match=f"layer {layer} cannot be tapped: the target has 6 layers"):
        context.tap([layer])


def test_layer_inputs_that_were_not_computed_cannot_be_read(context):
    out = np.empty((1, context.n_embd), np.float32)
    with pytest.raises(NativeError, match="0 rows of 0 layers"):
        context.layer_inputs(0, out)
    context.tap([2])
    with pytest.raises(NativeError, match="0 rows of 1 layers"):
        context.layer_inputs(0, out)
    context.decode_tokens(tokens(5, 6), 0, Outputs.LAST)
    with pytest.raises(NativeError, match=r"rows 2\.\.3"):
        context.layer_inputs(2, out)
    context.tap([1])
    with pytest.raises(NativeError, match="0 rows of 1 layers"):
        context.layer_inputs(0, out)


def test_a_token_outside_the_vocabulary_is_refused(context, n_vocab):
    for bad in (-1, n_vocab, 2**31 - 1):
        with pytest.raises(NativeError, match=rf"0\.\.{n_vocab - 1}, got"):
            context.decode_tokens(tokens(5, bad), 0, Outputs.LAST)
    context.decode_tokens(tokens(5, n_vocab - 1), 0, Outputs.LAST)


def test_a_batch_that_is_empty_or_too_large_is_refused(context):
    for n in (0, 33):
        with pytest.raises(NativeError, match=f"{n} rows does not fit: this context takes 1 to 32"):
            context.decode_tokens(np.full(n, 5, np.int32), 0, Outputs.LAST)


def test_a_non_causal_batch_must_fit_one_ubatch(context):
    context.set_causal(False)
    with pytest.raises(NativeError, match="takes 1 to 16"):
        context.decode_tokens(np.full(17, 5, np.int32), 0, Outputs.LAST)


def test_a_full_memory_is_an_error_and_leaves_the_context_usable(context):
    for start in range(0, 256, 32):
        context.decode_tokens(np.full(32, 5, np.int32), start, Outputs.LAST)
    with pytest.raises(NativeError, match="memory is full"):
        context.decode_tokens(tokens(5), 256, Outputs.LAST)
    assert context.truncate(250)
    context.decode_tokens(tokens(5), 250, Outputs.LAST)


def test_positions_that_do_not_follow_are_an_error(context):
    context.decode_tokens(tokens(5, 6), 0, Outputs.LAST)
    with pytest.raises(NativeError, match="batch is invalid"):
        context.decode_tokens(tokens(5), 7, Outputs.LAST)


def test_logits_are_those_of_the_rows_asked_for(context, n_vocab):
    with pytest.raises(NativeError, match="no logits"):
        context.logits()
    context.decode_tokens(tokens(5, 6, 7), 0, Outputs.ALL)
    rows = context.logits().copy()
    assert rows.shape == (3, n_vocab)
    context.clear()
    context.decode_tokens(tokens(5, 6, 7), 0, Outputs.LAST)
    np.testing.assert_array_equal(context.logits(), rows[2:])
    context.clear()
    context.decode_tokens(tokens(5, 6, 7), 0, Outputs.NONE)
    with pytest.raises(NativeError, match="no logits"):
        context.logits()


def test_a_context_without_selector_has_no_lattice(context):
    context.decode_tokens(tokens(5), 0, Outputs.ALL)
    with pytest.raises(NativeError, match="no selector rows"):
        context.lattice()


def test_features_of_another_width_are_refused(context):
    with pytest.raises(NativeError, match="features must be contiguous"):
        context.decode_features(np.zeros((2, 5), np.float32), 0)


def test_a_drafter_without_a_target_context_is_an_error(drafter_gguf):
    native.silence()
    drafter = Model(drafter_gguf, Placement())
    with pytest.raises(NativeError, match="cannot create a context"):
        Context.open(drafter, OPTIONS)
    drafter.close()


def test_a_file_that_is_no_model_is_an_error(tmp_path):
    native.silence()
    path = tmp_path / "text.gguf"
    path.write_text("not a model")
    with pytest.raises(NativeError, match=r"cannot load .*text\.gguf"):
        Model(path, Placement())


def test_a_missing_symbol_is_named_with_the_version_that_has_it(monkeypatch):
    name = "llama_set_embeddings_nextn"
    absent = loader.SYMBOLS[name]._replace(c="absent", itanium="absent", msvc="absent")
    monkeypatch.setitem(loader.SYMBOLS, name, absent)
    loader.function.cache_clear()
    with pytest.raises(NativeError, match=f"{name}.*0\\.3\\.36"):
        native.require_symbols()
    monkeypatch.undo()
    loader.function.cache_clear()
    native.require_symbols()


def run(code, **environment):
    import os

    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, check=True, capture_output=True, text=True
    ).stdout.split()


def test_a_library_named_in_the_environment_is_loaded_instead_of_the_stock_one(tmp_path):
    folder = tmp_path / "patched"
    folder.symlink_to(Path(llama_cpp.__file__).parent / "lib")
    code = "from dflash2 import native; l = native.library(); print(l.path, l.patched)"
    assert run(code) == [str(native.library().path), "False"]
    path, patched = run(code, DFLASH2_LIBRARY_PATH=str(folder))
    assert Path(path).parent == folder
    assert patched == "True"
    # Once llama_cpp has loaded its own library, that one stays.
    assert run("import llama_cpp; " + code, DFLASH2_LIBRARY_PATH=str(folder)) == [str(native.library().path), "False"]


def test_support_of_the_pinned_library_is_complete():
    found = native.support()
    assert (found.version, found.missing, found.drafters) == (LLAMA_CPP_PYTHON_VERSION, (), 2)
    assert found.library == native.library()


@pytest.mark.parametrize(
    ("name", "known"), [("dflash", True), ("qwen35", True), ("glm5-next", True), ("dflash-draft", False), ("", False)]
)
def test_architectures_are_asked_of_the_library_without_a_word(capfd, name, known):
    assert native.knows_architecture.__wrapped__(name) is known
    assert capfd.readouterr() == ("", "")
