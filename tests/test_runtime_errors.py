"""Pairs that cannot work end with one of our errors and exit status 1, never with a signal from llama.cpp."""

import subprocess
import sys

import gguf
import pytest

from dflash2.gguf_info import read_gguf_info


def attempt(target, drafter):
    """Open the pair in a process of its own; returns its exit status and the error it printed."""
    code = (
        "import sys; from dflash2 import DFlashLlama, Dflash2Error\n"
        "try: DFlashLlama(sys.argv[1], sys.argv[2], n_ctx=256, n_threads=1, verbose=False)\n"
        "except Dflash2Error as error: sys.exit(f'{type(error).__name__}: {error}')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(target), str(drafter)], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stderr.strip()


def copy_header(source, path, *, architecture=None, without=(), **changed):
    """A GGUF with the metadata of `source`, some of it changed, and its tensors' names without their data."""
    info = read_gguf_info(source)
    writer = gguf.GGUFWriter(str(path), architecture or info.architecture)
    for key, stored in info.metadata.items():
        name = key.replace(f"{info.architecture}.", f"{architecture}.", 1) if architecture else key
        if key in without or key == "general.architecture":
            continue
        value, kind = changed.get(key, stored), info.value_types[key]
        if kind.element is not None:
            writer.add_key_value(name, list(value), kind.kind, kind.element)
        else:
            writer.add_key_value(name, value, kind.kind)
    for tensor in info.tensors:
        writer.add_tensor_info(tensor.name, [1], gguf.np.dtype("float32"), 4)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("ab") as file:
        file.write(bytes(64 * len(info.tensors)))
    return path


def assert_refused(target, drafter, *words):
    status, message = attempt(target, drafter)
    assert status == 1, message
    assert message.count("\n") == 0, message
    for word in words:
        assert word in message


def test_a_drafter_given_as_target(drafter_gguf):
    assert_refused(drafter_gguf, drafter_gguf, "TargetMismatchError", "is a DFlash drafter", "target first")


def test_a_target_given_as_drafter(target_path):
    assert_refused(target_path, target_path, "TargetMismatchError", "'qwen3'", "dflash2-convert")


def test_a_missing_target(tmp_path, drafter_gguf):
    assert_refused(tmp_path / "gone.gguf", drafter_gguf, "GGUFError", "gone.gguf", "No such file")


def test_a_missing_drafter(target_path, tmp_path):
    assert_refused(target_path, tmp_path / "gone.gguf", "GGUFError", "gone.gguf", "No such file")


def test_a_file_that_is_not_gguf(target_path, tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    assert_refused(target_path, tmp_path / "notes.txt", "GGUFError", "notes.txt", "not a GGUF file")


def test_a_target_that_publishes_no_layer_inputs(target_path, drafter_gguf, tmp_path):
    target = copy_header(target_path, tmp_path / "phi3.gguf", architecture="phi3")
    assert_refused(target, drafter_gguf, "TargetMismatchError", "'phi3'", "qwen3")


def test_a_hidden_size_unlike_the_targets(target_path, drafter_gguf, tmp_path):
    target = copy_header(target_path, tmp_path / "wide.gguf", **{"qwen3.embedding_length": 320})
    assert_refused(target, drafter_gguf, "TargetMismatchError", "hidden size 288", "320")


def test_a_vocabulary_of_another_length(target_path, drafter_gguf, tmp_path):
    tokens = read_gguf_info(target_path).metadata["tokenizer.ggml.tokens"]
    target = copy_header(target_path, tmp_path / "long.gguf", **{"tokenizer.ggml.tokens": (*tokens, "extra")})
    assert_refused(target, drafter_gguf, "TargetMismatchError", f"vocabulary of {len(tokens)}", str(len(tokens) + 1))


def test_a_tap_beyond_the_targets_layers(target_path, drafter_gguf, tmp_path):
    target = copy_header(target_path, tmp_path / "flat.gguf", **{"qwen3.block_count": 4})
    assert_refused(target, drafter_gguf, "TargetMismatchError", "taps the input of layer 5", "0..3")


@pytest.mark.parametrize("key", ["tokenizer.ggml.mask_token_id", "dflash.block_size", "dflash.target_layers"])
def test_a_drafter_without_a_key_it_needs(target_path, drafter_gguf, tmp_path, key):
    drafter = copy_header(drafter_gguf, tmp_path / "bare.gguf", without={key})
    assert_refused(target_path, drafter, "TargetMismatchError", key.split(".")[-1])


def test_a_mask_token_outside_the_vocabulary(target_path, drafter_gguf, tmp_path):
    drafter = copy_header(drafter_gguf, tmp_path / "mask.gguf", **{"tokenizer.ggml.mask_token_id": 5000})
    assert_refused(target_path, drafter, "TargetMismatchError", "mask token 5000")


def test_half_a_selector(target_path, drafter_gguf, tmp_path):
    drafter = copy_header(drafter_gguf, tmp_path / "half.gguf", without={"dflash.selector_top_k"})
    assert_refused(target_path, drafter, "TargetMismatchError", "half a selector")


def test_a_drafter_whose_tensors_llama_cpp_refuses(target_path, drafter_gguf, tmp_path):
    drafter = copy_header(drafter_gguf, tmp_path / "hollow.gguf")
    assert_refused(target_path, drafter, "NativeError", "hollow.gguf")
