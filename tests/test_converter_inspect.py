"""`inspect` says what a GGUF file is; what it cannot find it calls missing instead of guessing."""

import json
from pathlib import Path

import pytest
from factories import make_drafter, make_target
from factories_check import edited_gguf, make_fork
from gguf import GGUFWriter
from gguf.constants import GGUFValueType

from dflash2.converter import Attention, Convolution, RopeFacts, Selector, Shard, TypeUse, convert, inspect
from dflash2.errors import Dflash2Error, GGUFError


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return make_target(tmp_path / "target.gguf")


def test_dflash2_drafter(tmp_path, target):
    done = convert(make_drafter(tmp_path / "Tiny-DFlash2"), target, tmp_path / "out.gguf", outtype="q8_0")
    seen = inspect(done.output)
    facts = seen.drafter
    assert facts.version == 2
    assert (facts.block_size, facts.mask_token_id) == (4, 1)
    assert (facts.taps, facts.hf_taps) == ((1, 3, 4), (0, 2, 3))
    assert facts.attention == Attention((True, True), 32, causal_full=False, causal_sliding=False)
    assert (facts.convolution, facts.selector) == (Convolution(2, 16), Selector(32, 4))
    assert facts.rope == RopeFacts(10000.0, None, None, ())
    assert not facts.own_embeddings
    assert (seen.architecture, seen.name, seen.file_type) == ("dflash", "Tiny DFlash2", "Q8_0")
    assert (seen.layers, seen.hidden_size, seen.context_length, seen.vocab_size) == (2, 64, 256, 288)
    assert seen.n_parameters == done.n_parameters
    assert [use.type_name for use in seen.types] == ["Q8_0", "F32"]
    assert sum(use.n_tensors for use in seen.types) == len(seen.tensors) == done.n_tensors
    assert seen.n_bytes == done.n_bytes


def test_rows_of_a_drafter_with_two_kinds_of_layers(tmp_path):
    drafter = make_drafter(
        tmp_path / "drafter",
        1,
        layer_types=["sliding_attention", "full_attention"],
        rope_scaling={"rope_type": "linear", "factor": 4.0},
        without=["is_causal"],
    )
    target = make_target(tmp_path / "m.gguf", architecture="qwen35", mrope=True)
    convert(drafter, target, tmp_path / "out.gguf")
    rows = dict(inspect(tmp_path / "out.gguf").rows())
    assert rows["kind"] == "DFlash drafter (v1, no selector)"
    assert rows["sliding layers"] == "1, window 32 tokens, causal"
    assert rows["full layers"] == "1, not causal"
    assert rows["rope"] == "theta 10000, linear x4, M-RoPE sections 8, 0, 0, 0"
    assert rows["embeddings and head"] == "the target's"
    assert rows["taps (input of target layer)"] == "1, 3, 4"
    assert rows["taps (Hugging Face ids)"] == "0, 2, 3"
    assert "selector" not in rows


def test_other_models_show_their_basic_facts(target):
    seen = inspect(target)
    assert seen.drafter is None
    rows = dict(seen.rows())
    assert rows["kind"] == "qwen3 model"
    assert (rows["layers"], rows["hidden size"], rows["vocabulary"]) == ("5", "64", "288 tokens")
    assert rows["file type"] == "missing"
    assert "block size" not in rows
    assert seen.types[0] == TypeUse("Q8_0", 36, sum(t.n_bytes for t in seen.tensors if t.type_name == "Q8_0"))


def test_drafter_without_its_keys_says_missing(tmp_path):
    path = tmp_path / "bare.gguf"
    writer = GGUFWriter(path, "dflash")
    writer.add_block_count(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    rows = dict(inspect(path).rows())
    assert rows["block size"] == rows["mask token"] == rows["name"] == rows["taps (Hugging Face ids)"] == "missing"
    assert rows["rope"] == "theta missing"
    assert rows["full layers"] == "1, not causal"


def test_what_is_no_gguf_is_an_error(tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(b"PK\x03\x04 and more")
    with pytest.raises(GGUFError, match=r"x\.gguf is not a GGUF file; give the path of a \.gguf model\.$"):
        inspect(path)


def test_checkpoint_folder_with_its_dialect_licence_and_tensors(tmp_path):
    folder = make_drafter(tmp_path / "Tiny-DFlash2")
    (folder / "README.md").write_text("---\nlicense: cc-by-nc-nd-4.0\n---\n# card\n")
    seen = inspect(folder)
    assert (seen.kind, seen.architecture, seen.license) == ("checkpoint", "DFlash2DraftModel", "cc-by-nc-nd-4.0")
    assert (seen.layers, seen.hidden_size, seen.vocab_size) == (2, 64, 288)
    facts = seen.checkpoint
    assert facts.convertible
    assert (facts.config.taps, facts.config.block_size, facts.quantization) == ((0, 2, 3), 4, None)
    assert facts.files == ("model.safetensors",)
    assert seen.types == (TypeUse("BF16", len(seen.tensors), seen.n_bytes),)
    assert next(t.shape for t in seen.tensors if t.name == "fc.weight") == (192, 64)
    rows = dict(seen.rows())
    assert rows["kind"] == "drafter checkpoint (DFlash2DraftModel)"
    assert rows["convertible"] == "yes"


def test_folder_that_cannot_be_converted_is_inspected_and_says_why(tmp_path):
    folder = make_drafter(tmp_path / "drafter", architectures=["LlamaForCausalLM"])
    seen = inspect(folder)
    assert not seen.checkpoint.convertible
    assert "architecture 'LlamaForCausalLM' is not supported" in seen.checkpoint.reason
    assert seen.checkpoint.config is None
    assert (seen.layers, len(seen.tensors) > 0) == (None, True)
    assert dict(seen.rows())["kind"] == "checkpoint (LlamaForCausalLM)"


def test_folder_without_weights_says_so(tmp_path):
    folder = make_drafter(tmp_path / "drafter")
    (folder / "model.safetensors").unlink()
    seen = inspect(folder)
    assert "has no .safetensors file" in seen.checkpoint.reason
    assert seen.checkpoint.config.block_size == 4
    assert seen.tensors == ()


def test_quantised_checkpoint_names_its_method(tmp_path):
    quantized = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}}
    seen = inspect(make_drafter(tmp_path / "drafter", quantization_config=quantized))
    assert seen.checkpoint.quantization == "compressed-tensors pack-quantized"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda tmp: tmp, r"has no config\.json; give a GGUF file or a checkpoint folder\.$"),
        (lambda tmp: (tmp / "a.gguf").write_bytes(b"x") and tmp, r"has no config\.json; give one of its GGUF files"),
        (lambda _tmp: "", r"^the path is empty; give"),
        (lambda tmp: tmp / "gone.gguf", r"^Cannot read .*gone\.gguf: No such file or directory\.$"),
        (lambda tmp: make_drafter(tmp / "d") / "model.safetensors", r"is one file of a checkpoint; give its folder"),
        (lambda tmp: make_drafter(tmp / "d") / "config.json", r"is one file of a checkpoint; give its folder"),
    ],
    ids=["folder", "folder of GGUFs", "empty", "missing", "weights", "config"],
)
def test_what_cannot_be_inspected_says_what_to_give(tmp_path, make, says):
    with pytest.raises(Dflash2Error, match=says):
        inspect(make(tmp_path))


def test_part_of_a_split_target_is_named(tmp_path):
    key = ("split.no", 1), ("split.count", 3)
    metadata = {name: (value, GGUFValueType.UINT16, None) for name, value in key}
    metadata["split.tensors.count"] = (57, GGUFValueType.INT32, None)
    seen = inspect(make_target(tmp_path / "m-00002-of-00003.gguf", metadata=metadata))
    assert seen.shard == Shard(2, 3, 57)
    assert dict(seen.rows())["part"] == "2 of 3"


@pytest.mark.parametrize(
    ("edit", "found"),
    [
        ({"without": ("dflash.selector_top_k",)}, ["selector_hidden.weight"]),
        ({"drop_tensors": ("selector_hidden.weight",)}, ["dflash.selector_top_k"]),
    ],
)
def test_half_a_selector_is_named_as_broken(tmp_path, target, edit, found):
    whole = convert(make_drafter(tmp_path / "drafter"), target, tmp_path / "out.gguf").output
    seen = inspect(edited_gguf(whole, tmp_path / "half.gguf", **edit))
    broken = next(finding for finding in seen.problems if finding.key == "selector")
    assert (broken.level, broken.found) == ("error", found)
    assert any(label == "error" and value.startswith("selector: ") for label, value in seen.rows())


def test_json_has_the_same_fields_for_every_kind_of_drafter(tmp_path, target):
    folder = make_drafter(tmp_path / "drafter")
    whole = convert(folder, target, tmp_path / "out.gguf").output
    fork = make_fork(whole, tmp_path / "fork.gguf")
    of_folder, of_file, of_fork, of_target = (inspect(path).to_dict() for path in (folder, whole, fork, target))
    assert set(of_folder) == set(of_file) == set(of_fork) == set(of_target)
    assert of_file["schema"] == "dflash2.inspect/1"
    assert set(of_folder["drafter"]) == set(of_file["drafter"])
    for key in ("version", "block_size", "mask_token_id", "taps", "gguf_taps", "attention", "convolution", "selector"):
        assert of_folder["drafter"][key] == of_file["drafter"][key] == of_fork["drafter"][key]
    assert (of_file["drafter"]["taps"], of_file["drafter"]["gguf_taps"]) == ([0, 2, 3], [1, 3, 4])
    assert of_target["drafter"] is None
    assert of_target["checkpoint"] is None
    assert [finding["key"] for finding in of_fork["problems"]] == ["architecture"]
    assert json.loads(json.dumps([of_folder, of_file, of_fork, of_target]))[1] == of_file


def test_json_lists_tensors_on_request(target):
    assert "tensors" not in inspect(target).to_dict()
    listed = inspect(target).to_dict(tensors=True)["tensors"]
    assert listed[0] == {"name": "token_embd.weight", "shape": [64, 288], "type": "Q8_0", "bytes": 288 * 68}
