"""Converting a drafter: values, types and names in the file, and what is on disk while and after it is written."""

import os
from pathlib import Path

import llama_cpp
import numpy as np
import pytest
from factories import (
    HIDDEN,
    VOCAB,
    drafter_config,
    drafter_tensors,
    make_drafter,
    make_target,
    save_safetensors,
    stored_bytes,
    write_checkpoint,
)
from gguf.constants import GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize

from dflash2.converter import Conversion, convert
from dflash2.errors import CheckpointError, OutputError
from dflash2.gguf_info import GGUFInfo, ValueType, read_gguf_info


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return make_target(tmp_path / "target.gguf")


def tensor_values(info: GGUFInfo, name: str) -> np.ndarray:
    tensor = info.tensor(name)
    raw = info.path.read_bytes()[tensor.offset : tensor.offset + tensor.n_bytes]
    kind = GGMLQuantizationType[tensor.type_name]
    return dequantize(np.frombuffer(raw, np.uint8).reshape(-1, tensor.n_bytes), kind).reshape(tensor.shape[::-1])


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.suffix in {".tmp", ".gguf"})


def test_values_and_shapes_survive(tmp_path, target):
    config = drafter_config(2)
    tensors = drafter_tensors(config)
    drafter = write_checkpoint(tmp_path / "drafter", config, tensors, dtype="F32")
    done = convert(drafter, target, tmp_path / "out.gguf", outtype="f32")
    info = read_gguf_info(tmp_path / "out.gguf")
    expected = {
        "fc.weight": "fc.weight",
        "enc.output_norm.weight": "hidden_norm.weight",
        "output_norm.weight": "norm.weight",
        "blk.1.attn_q.weight": "layers.1.self_attn.q_proj.weight",
        "blk.1.attn_output.weight": "layers.1.self_attn.o_proj.weight",
        "blk.0.ffn_norm.weight": "layers.0.post_attention_layernorm.weight",
        "blk.0.attn_conv_base": "layers.0.attention_conv.base_kernel",
        "blk.0.ffn_conv_proj.weight": "layers.0.mlp_conv.kernel_projection.weight",
        "selector_predecessor.weight": "candidate_selector.predecessor_codebook",
        "selector_successor.weight": "candidate_selector.successor_codebook",
        "selector_hidden.weight": "candidate_selector.hidden_projection.weight",
    }
    for name, source in expected.items():
        np.testing.assert_array_equal(tensor_values(info, name), tensors[source], err_msg=name)
    assert len(info.tensors) == done.n_tensors == 3 + 3 + 2 * 15
    assert done.n_parameters == sum(values.size for values in tensors.values())
    assert done.n_bytes == (tmp_path / "out.gguf").stat().st_size
    assert done.notes == ()


def test_bf16_is_copied_bit_for_bit(tmp_path, target):
    config = drafter_config(1)
    tensors = drafter_tensors(config)
    convert(write_checkpoint(tmp_path / "drafter", config, tensors), target, tmp_path / "out.gguf", outtype="bf16")
    info = read_gguf_info(tmp_path / "out.gguf")
    fc = info.tensor("fc.weight")
    raw = info.path.read_bytes()[fc.offset : fc.offset + fc.n_bytes]
    assert fc.type_name == "BF16"
    assert raw == stored_bytes(tensors["fc.weight"], "BF16")


def test_vectors_and_convolution_bases_stay_f32(tmp_path, target):
    convert(make_drafter(tmp_path / "drafter"), target, tmp_path / "out.gguf", outtype="q8_0")
    types = {tensor.name: tensor.type_name for tensor in read_gguf_info(tmp_path / "out.gguf").tensors}
    assert types["blk.0.attn_conv_base"] == types["output_norm.weight"] == types["blk.0.attn_q_norm.weight"] == "F32"
    assert types["fc.weight"] == types["blk.0.attn_conv_proj.weight"] == types["selector_successor.weight"] == "Q8_0"


def test_rows_that_q8_0_cannot_split_become_f16(tmp_path, target):
    drafter = make_drafter(tmp_path / "drafter", dflash_config={"selector_rank": 24})
    convert(drafter, target, tmp_path / "out.gguf", outtype="q8_0")
    types = {tensor.name: tensor.type_name for tensor in read_gguf_info(tmp_path / "out.gguf").tensors}
    assert types["selector_predecessor.weight"] == "F16"
    assert types["selector_hidden.weight"] == "Q8_0"


@pytest.mark.parametrize("value", [65520.0, -1e5])
def test_f16_refuses_values_out_of_range_and_names_the_tensor(tmp_path, target, value):
    config = drafter_config(1)
    tensors = drafter_tensors(config)
    tensors["layers.1.mlp.down_proj.weight"][3, 5] = value
    drafter = write_checkpoint(tmp_path / "drafter", config, tensors)
    message = (
        r"model\.safetensors: tensor 'layers\.1\.mlp\.down_proj\.weight' has values that F16 cannot hold"
        r" \(beyond \+-65504\); convert with outtype bf16 or f32\.$"
    )
    with pytest.raises(CheckpointError, match=message):
        convert(drafter, target, tmp_path / "out.gguf", outtype="f16")
    assert leftovers(tmp_path) == ["target.gguf"]


@pytest.mark.parametrize("outtype", ["f32", "f16", "bf16", "q8_0"])
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_values_that_are_not_finite_are_refused(tmp_path, target, value, dtype, outtype):
    config = drafter_config(1)
    tensors = drafter_tensors(config)
    tensors["layers.1.self_attn.k_norm.weight"][5] = value
    drafter = write_checkpoint(tmp_path / "drafter", config, tensors, dtype=dtype)
    with pytest.raises(CheckpointError, match=r"'layers\.1\.self_attn\.k_norm\.weight' has values that are infinite"):
        convert(drafter, target, tmp_path / "out.gguf", outtype=outtype)
    assert leftovers(tmp_path) == ["target.gguf"]


def test_taps_are_shifted_once(tmp_path, target):
    convert(make_drafter(tmp_path / "drafter"), target, tmp_path / "out.gguf")
    info = read_gguf_info(tmp_path / "out.gguf")
    assert info.metadata["dflash.target_layers"] == (1, 3, 4)
    assert info.value_types["dflash.target_layers"] == ValueType(GGUFValueType.ARRAY, GGUFValueType.INT32)


def test_every_tokenizer_key_of_the_target_is_copied_with_its_type(tmp_path):
    extra = {
        "tokenizer.ggml.mask_token_id": (5, GGUFValueType.UINT32, None),
        "tokenizer.ggml.scores": ([0.5] * VOCAB, GGUFValueType.ARRAY, GGUFValueType.FLOAT32),
        "tokenizer.chat_template.tool_use": ("{{ tools }}", GGUFValueType.STRING, None),
        "tokenizer.ggml.precompiled_charsmap": ([1, 255, 0], GGUFValueType.ARRAY, GGUFValueType.UINT8),
        "tokenizer.ggml.odd": ([b"\xff\xfe", b"ok"], GGUFValueType.ARRAY, GGUFValueType.STRING),
    }
    target = make_target(tmp_path / "target.gguf", metadata=extra)
    convert(make_drafter(tmp_path / "drafter"), target, tmp_path / "out.gguf")
    theirs, ours = read_gguf_info(target), read_gguf_info(tmp_path / "out.gguf")
    keys = {key for key in theirs.metadata if key.startswith("tokenizer.")}
    assert keys == {key for key in ours.metadata if key.startswith("tokenizer.")}
    for key in keys - {"tokenizer.ggml.mask_token_id"}:
        assert (ours.value_types[key], ours.metadata[key]) == (theirs.value_types[key], theirs.metadata[key]), key
    assert ours.metadata["tokenizer.ggml.mask_token_id"] == 1
    assert "token_embd.weight" not in ours.tensor_names


def test_only_mrope_targets_give_rope_sections(tmp_path, target):
    drafter = make_drafter(tmp_path / "drafter")
    convert(drafter, target, tmp_path / "plain.gguf")
    convert(drafter, make_target(tmp_path / "m.gguf", architecture="qwen35", mrope=True), tmp_path / "sections.gguf")
    assert "dflash.rope.dimension_sections" not in read_gguf_info(tmp_path / "plain.gguf").metadata
    assert read_gguf_info(tmp_path / "sections.gguf").metadata["dflash.rope.dimension_sections"] == (8, 0, 0, 0)


def converted_bytes(drafter: Path, target: Path, output: Path) -> bytes:
    """The file without its name, which follows the folder's."""
    convert(drafter, target, output)
    info = read_gguf_info(output)
    return b"".join(tensor_values(info, tensor.name).tobytes() for tensor in info.tensors)


def test_names_and_shards_make_no_difference(tmp_path, target):
    config = drafter_config(2)
    tensors = drafter_tensors(config)
    prefixed = {f"model.{name}": values for name, values in tensors.items()}
    modules = {f"{name}.weight" if name.endswith("_codebook") else name: values for name, values in tensors.items()}
    checkpoints = [
        write_checkpoint(tmp_path / "single", config, tensors),
        write_checkpoint(tmp_path / "prefixed", config, prefixed),
        write_checkpoint(tmp_path / "modules", config, modules),
        write_checkpoint(tmp_path / "sharded", config, tensors, shards=3),
        write_checkpoint(tmp_path / "no index", config, tensors, shards=3, index=False),
        write_checkpoint(tmp_path / "odd names", config, tensors, shards=2, index=False, stem="dflash_draft_model"),
        write_checkpoint(tmp_path / "odd index", config, tensors, shards=2, stem="consolidated"),
    ]
    results = {converted_bytes(folder, target, tmp_path / f"{folder.name}.gguf") for folder in checkpoints}
    assert len(results) == 1


def test_computed_buffers_are_left_out(tmp_path, target):
    config = drafter_config(1)
    tensors = drafter_tensors(config) | {"rotary_emb.inv_freq": np.ones(8, np.float32)}
    done = convert(write_checkpoint(tmp_path / "drafter", config, tensors), target, tmp_path / "out.gguf")
    assert done.n_tensors == len(tensors) - 1


EMBEDDING_CASES = {
    "embeddings and head": (["embed_tokens.weight", "lm_head.weight"], {}, ["token_embd.weight", "output.weight"]),
    "tied embeddings": (["embed_tokens.weight"], {"tie_word_embeddings": True}, ["token_embd.weight"]),
    "embeddings alone": (["embed_tokens.weight"], {}, []),
    "head alone": (["lm_head.weight"], {}, []),
    "not its own": (["embed_tokens.weight", "lm_head.weight"], {"has_embed_tokens": False}, []),
}


@pytest.mark.parametrize("case", EMBEDDING_CASES)
def test_embeddings_and_head_are_kept_both_or_neither(tmp_path, target, case):
    present, changes, kept = EMBEDDING_CASES[case]
    config = drafter_config(1, **changes)
    tensors = drafter_tensors(config) | {name: np.ones((VOCAB, HIDDEN), np.float32) for name in present}
    done = convert(write_checkpoint(tmp_path / "drafter", config, tensors), target, tmp_path / "out.gguf")
    names = read_gguf_info(tmp_path / "out.gguf").tensor_names
    assert sorted(names & {"token_embd.weight", "output.weight"}) == sorted(kept)
    assert ("uses the target's embeddings and head" in " ".join(done.notes)) == (not kept)


def test_progress_counts_the_bytes_of_all_tensors(tmp_path, target):
    calls = []
    convert(
        make_drafter(tmp_path / "drafter"), target, tmp_path / "out.gguf", progress=lambda *call: calls.append(call)
    )
    total = sum(tensor.n_bytes for tensor in read_gguf_info(tmp_path / "out.gguf").tensors)
    assert calls[-1] == (total, total)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


def test_large_tensors_come_in_chunks_that_change_nothing(tmp_path, target, monkeypatch):
    drafter = make_drafter(tmp_path / "drafter", dtype="F32")
    whole = converted_bytes(drafter, target, tmp_path / "whole.gguf")
    monkeypatch.setattr("dflash2.converter.encoding._CHUNK_ELEMENTS", 250)
    assert converted_bytes(drafter, target, tmp_path / "chunks.gguf") == whole


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
LOADED = {
    "v1": (1, {}),
    "v2": (2, {}),
    "mixed layers": (1, {"layer_types": ["sliding_attention", "full_attention"], "without": ["is_causal"]}),
    "llama3 rope": (2, {"rope_scaling": LLAMA3}),
    "yarn": (1, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.0}}),
}


@pytest.mark.parametrize("case", LOADED)
def test_llama_cpp_loads_the_result(tmp_path, target, case):
    """Its loader fails for a tensor or key that is missing or left over."""
    version, changes = LOADED[case]
    convert(make_drafter(tmp_path / "drafter", version, **changes), target, tmp_path / "out.gguf", outtype="q8_0")
    parameters = llama_cpp.llama_model_default_params()
    model = llama_cpp.llama_model_load_from_file(os.fsencode(tmp_path / "out.gguf"), parameters)
    assert model
    assert llama_cpp.llama_model_n_layer(model) == 2
    llama_cpp.llama_model_free(model)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_interrupted_conversion_leaves_the_old_file_and_nothing_else(tmp_path, target, error):
    output = tmp_path / "out.gguf"
    output.write_bytes(b"what was here before")

    def interrupt(done: int, total: int) -> None:
        if done > total // 2:
            raise error

    with pytest.raises(error):
        convert(make_drafter(tmp_path / "drafter"), target, output, progress=interrupt)
    assert output.read_bytes() == b"what was here before"
    assert leftovers(tmp_path) == ["out.gguf", "target.gguf"]


def test_existing_output_is_replaced(tmp_path, target):
    output = tmp_path / "out.gguf"
    output.write_bytes(b"old")
    assert isinstance(convert(make_drafter(tmp_path / "drafter"), target, output), Conversion)
    assert read_gguf_info(output).architecture == "dflash"


def test_output_gets_ordinary_permissions(tmp_path, target):
    convert(make_drafter(tmp_path / "drafter"), target, tmp_path / "out.gguf")
    plain = tmp_path / "plain"
    plain.write_bytes(b"")
    assert (tmp_path / "out.gguf").stat().st_mode == plain.stat().st_mode


def test_unknown_output_type_is_named(tmp_path, target):
    with pytest.raises(OutputError, match=r"^Output type 'q4_x' is not known; choose one of f32, f16, bf16, q8_0,"):
        convert(make_drafter(tmp_path / "drafter"), target, tmp_path / "out.gguf", outtype="q4_x")


def test_relative_paths_and_odd_file_names_work(tmp_path, monkeypatch):
    make_drafter(tmp_path / "drafter")
    make_target(tmp_path / "target.gguf")
    monkeypatch.chdir(tmp_path)
    convert(Path("drafter"), Path("target.gguf"), Path("a b {c}.gguf"))
    assert read_gguf_info(tmp_path / "a b {c}.gguf").metadata["general.name"] == "Drafter"
    assert os.fspath(read_gguf_info(Path("a b {c}.gguf")).path) == "a b {c}.gguf"


def test_two_files_with_one_tensor_are_refused(tmp_path, target):
    drafter = make_drafter(tmp_path / "drafter")
    save_safetensors(drafter / "consolidated.safetensors", {"model.fc.weight": np.zeros((1, 1), np.float32)}, "BF16")
    message = (
        r"tensor 'fc\.weight' appears twice, in consolidated\.safetensors and in model\.safetensors; remove the file"
    )
    with pytest.raises(CheckpointError, match=message):
        convert(drafter, target, tmp_path / "out.gguf")
