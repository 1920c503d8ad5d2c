"""What llama.cpp would assert, and so kill the interpreter, is a NativeError here."""

import ctypes
import subprocess
import sys
from pathlib import Path

import llama_cpp
import numpy as np
import pytest

from dflash2 import native
from dflash2.builds import cpu_identity, write_manifest
from dflash2.constants import LLAMA_CPP_COMMIT, LLAMA_CPP_PYTHON_VERSION, PATCHED_ABI_VERSION
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
    ).stdout.splitlines()


SHOW = "from dflash2 import native; l = native.library(); print(l.path, l.imported_before, l.reason, sep='\\n')"


def test_a_library_named_in_the_environment_is_loaded_instead_of_the_stock_one(tmp_path):
    folder = tmp_path / "chosen"
    folder.symlink_to(Path(llama_cpp.__file__).parent / "lib")
    stock = str(Path(llama_cpp.__file__).parent / "lib" / native.library().path.name)
    assert run(SHOW, DFLASH2_LIBRARY="stock") == [stock, "False", "DFLASH2_LIBRARY is stock"]
    path, before, reason = run(SHOW, DFLASH2_LIBRARY=str(folder))
    assert (Path(path).parent, before, reason) == (folder, "False", "DFLASH2_LIBRARY names it")
    # Programs that we start choose for themselves.
    assert (
        run(SHOW + "; import os; print('LLAMA_CPP_LIB_PATH' in os.environ)", DFLASH2_LIBRARY=str(folder))[3] == "False"
    )


def test_a_library_that_llama_cpp_loaded_before_stays(tmp_path):
    folder = tmp_path / "chosen"
    folder.symlink_to(Path(llama_cpp.__file__).parent / "lib")
    path, before, reason = run("import llama_cpp; " + SHOW, DFLASH2_LIBRARY=str(folder))
    assert Path(path).parent == Path(llama_cpp.__file__).parent / "lib"
    assert (before, reason) == (
        "True",
        "llama_cpp was imported before dflash2, so the library that it had loaded stays",
    )


def test_the_variable_of_llama_cpp_is_left_as_the_user_set_it(tmp_path):
    folder = tmp_path / "chosen"
    folder.symlink_to(Path(llama_cpp.__file__).parent / "lib")
    path, _, reason = run(SHOW, LLAMA_CPP_LIB_PATH=str(folder), DFLASH2_LIBRARY="")
    assert (Path(path).parent, reason) == (folder, "LLAMA_CPP_LIB_PATH names it")


def test_a_folder_without_a_library_is_named(tmp_path):
    code = "from dflash2 import errors, native\ntry: native.library()\nexcept errors.NativeError as e: print(e)"
    (message,) = run(code, DFLASH2_LIBRARY=str(tmp_path))
    assert message == f"DFLASH2_LIBRARY is '{tmp_path}', a folder without libllama; name another, or stock."


def test_a_build_that_cannot_be_loaded_leaves_the_stock_library_in_place(tmp_path):
    libraries = tmp_path / "builds" / "0123456789abcdef" / "tree" / "bin"
    libraries.mkdir(parents=True)
    (libraries / native.library().path.name).write_bytes(b"no library")
    facts = {
        "base": LLAMA_CPP_COMMIT,
        "stock": False,
        "targets": ["libs"],
        "abi": PATCHED_ABI_VERSION,
        "cpu": cpu_identity(),
    }
    write_manifest(libraries.parents[1], facts)
    path, _, reason = run(SHOW, DFLASH2_LIBRARY="", DFLASH2_CACHE=str(tmp_path))
    assert Path(path).parent == Path(llama_cpp.__file__).parent / "lib"
    assert reason.startswith("the patched build 0123456789abcdef cannot be loaded (")


@pytest.mark.parametrize(
    "other", [{"cpu": "another"}, {"abi": 99}, {"base": "b11434"}, {"stock": True}, {"module": True}]
)
def test_a_build_for_another_machine_or_purpose_is_not_taken(tmp_path, other):
    libraries = tmp_path / "builds" / "0123456789abcdef" / "tree" / "bin"
    libraries.parent.mkdir(parents=True)
    libraries.symlink_to(Path(llama_cpp.__file__).parent / "lib")
    facts = {"base": LLAMA_CPP_COMMIT, "stock": False, "targets": ["libs"], "abi": PATCHED_ABI_VERSION}
    facts["cpu"] = cpu_identity()
    write_manifest(libraries.parents[1], facts)
    assert Path(run(SHOW, DFLASH2_LIBRARY="", DFLASH2_CACHE=str(tmp_path))[0]).parent == libraries
    write_manifest(libraries.parents[1], {**facts, **other})
    path, _, reason = run(SHOW, DFLASH2_LIBRARY="", DFLASH2_CACHE=str(tmp_path))
    assert Path(path).parent == Path(llama_cpp.__file__).parent / "lib"
    assert reason == "there is no patched build for this machine; `dflash2 build` makes one"


def test_devices_are_those_of_the_library_in_use():
    ggml = llama_cpp.llama_cpp._lib
    ggml.ggml_backend_dev_count.restype = ctypes.c_size_t
    assert len(native.device_names()) == ggml.ggml_backend_dev_count() > 0


def test_a_library_without_rpc_says_so():
    with pytest.raises(NativeError, match="has no RPC; `dflash2 build --targets libs,rpc` makes one"):
        native.add_rpc_server("127.0.0.1:50052")


@pytest.mark.parametrize(
    "endpoints",
    [("127.0.0.1:50052", "localhost:50052"), ("localhost:50052", "localhost:50052"), ("0.0.0.0:1", "a:2", "127.1:1")],
)
def test_one_rpc_server_under_two_names_is_refused(endpoints):
    with pytest.raises(NativeError, match=f"^{endpoints[0]} and {endpoints[-1]} are the same RPC server"):
        native.check_distinct(endpoints)


def test_rpc_servers_of_other_ports_or_unknown_machines_are_others():
    native.check_distinct(("127.0.0.1:1", "localhost:2", "127.0.0.2:1", "no.such.host.invalid:1", "localhost:x", ""))


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
