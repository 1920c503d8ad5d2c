"""The known ways in which a conversion gives a file that loads and drafts badly: each is kept exactly or refused."""

import json
import re

import numpy as np
import pytest
from factories import (
    HIDDEN,
    MASK_TOKEN,
    TARGET_LAYERS,
    VOCAB,
    drafter_config,
    drafter_tensors,
    make_target,
    write_checkpoint,
)
from factories_parts import saved
from gguf import GGUFReader

from dflash2 import native
from dflash2.converter import Overrides, convert
from dflash2.errors import CheckpointError, TargetMismatchError, UnsupportedCheckpointError
from dflash2.gguf_info import read_gguf_info
from dflash2.runtime.draft import draft
from dflash2.runtime.pair import read_pair


class Job:
    """A checkpoint beside a target, and what converting it gives."""

    def __init__(self, folder):
        self.drafter, self.target, self.output = folder / "drafter", folder / "target.gguf", folder / "out.gguf"
        make_target(self.target)

    def write(self, version=2, extra=None, without_tensors=(), dtype="BF16", shards=1, stem="model", **changes):
        config = drafter_config(version, **changes)
        tensors = drafter_tensors(config) | (extra or {})
        for name in without_tensors:
            del tensors[name]
        write_checkpoint(self.drafter, config, tensors, dtype=dtype, shards=shards, index=False, stem=stem)

    def convert(self, **overrides):
        done = convert(self.drafter, self.target, self.output, overrides=Overrides(**overrides))
        written = read_gguf_info(self.output)
        keys = {key.removeprefix("dflash."): value for key, value in written.metadata.items()}
        return done.notes, keys, {tensor.name for tensor in written.tensors}

    def refuse(self, error, message):
        with pytest.raises(error, match=re.escape(message)):
            convert(self.drafter, self.target, self.output)
        assert not self.output.exists()


@pytest.fixture
def job(tmp_path):
    return Job(tmp_path)


def test_hazard_01_no_block_size_anywhere_is_refused_until_the_user_gives_it(job):
    job.write(1, without=["block_size"])
    job.refuse(CheckpointError, "'block_size' is missing; add the value the drafter was trained with, or give it with")
    assert job.convert(block_size=7)[1]["block_size"] == 7


def test_hazard_02_a_window_without_use_sliding_window_is_kept_and_told(job):
    job.write(without=["use_sliding_window", "is_causal"])
    notes, keys, _ = job.convert()
    assert (keys["attention.sliding_window"], keys["attention.sliding_window_pattern"]) == (32, (True, True))
    assert keys["attention.causal"] is True
    assert "'use_sliding_window' is absent: the window of 32 tokens is kept." in notes


def test_hazard_02_a_window_switched_off_is_dropped_and_causality_kept(job):
    job.write(without=["is_causal"], use_sliding_window=False)
    notes, keys, _ = job.convert()
    assert "attention.sliding_window" not in keys
    assert keys["attention.causal"] is True
    assert "'use_sliding_window' is false: sliding layers get no window and keep their causality." in notes


@pytest.mark.parametrize(("wanted", "window"), [(True, 32), (False, None)])
def test_hazard_02_the_user_settles_the_window(job, wanted, window):
    job.write(use_sliding_window=not wanted)
    notes, keys, _ = job.convert(sliding_window=wanted)
    assert keys.get("attention.sliding_window") == window
    assert any(note.startswith("By your choice: ") for note in notes)


def test_hazard_03_mixed_layers_without_is_causal_carry_both_rules(job):
    job.write(layer_types=["sliding_attention", "full_attention"], without=["is_causal"])
    notes, keys, _ = job.convert()
    assert (keys["attention.causal"], keys["attention.causal_swa"]) == (False, True)
    assert keys["attention.sliding_window_pattern"] == (True, False)
    assert any("stock llama.cpp has one flag and drafts worse" in note for note in notes)


def test_hazard_03_one_rule_for_all_layers_needs_one_flag(job):
    job.write(layer_types=["sliding_attention", "full_attention"], is_causal=True)
    keys = job.convert()[1]
    assert keys["attention.causal"] is True
    assert "attention.causal_swa" not in keys


def test_hazard_04_no_mask_token_is_refused_until_the_user_gives_it(job):
    job.write(without=["mask_token_id"])
    job.refuse(CheckpointError, "'mask_token_id' is missing; add the value the drafter was trained with, or give it")
    assert job.convert(mask_token_id=3)[1]["tokenizer.ggml.mask_token_id"] == 3


def test_hazard_04_the_drafters_mask_goes_before_the_targets(job):
    from gguf.constants import GGUFValueType

    make_target(job.target, metadata={"tokenizer.ggml.mask_token_id": (5, GGUFValueType.UINT32, None)})
    job.write()
    assert job.convert()[1]["tokenizer.ggml.mask_token_id"] == MASK_TOKEN


TABLE = np.zeros((VOCAB, HIDDEN), np.float32)


@pytest.mark.parametrize("only", ["embed_tokens.weight", "lm_head.weight"])
def test_hazard_05_embeddings_or_head_alone_are_left_out_and_told(job, only):
    job.write(extra={only: TABLE})
    notes, _, tensors = job.convert()
    assert not {"token_embd.weight", "output.weight"} & tensors
    assert f"{only} left out: the drafter uses the target's embeddings and head." in notes


def test_hazard_05_both_are_kept_and_tied_embeddings_serve_as_the_head(job):
    job.write(extra={"embed_tokens.weight": TABLE, "lm_head.weight": TABLE})
    assert {"token_embd.weight", "output.weight"} <= job.convert()[2]
    job.write(extra={"embed_tokens.weight": TABLE}, tie_word_embeddings=True)
    assert {"token_embd.weight", "output.weight"} & job.convert()[2] == {"token_embd.weight"}


def test_hazard_06_odd_shard_names_are_all_read(job):
    job.write(shards=2, stem="dflash_draft_model")
    assert len(job.convert()[2]) == len(drafter_tensors(drafter_config(2)))


def test_hazard_06_a_missing_shard_is_named(job):
    job.write(shards=2, stem="dflash_draft_model")
    (job.drafter / "dflash_draft_model-00002-of-00002.safetensors").unlink()
    job.refuse(CheckpointError, "lacks the shard dflash_draft_model-00002-of-00002.safetensors; download it.")


def test_hazard_06_a_missing_tensor_is_named(job):
    job.write(without_tensors=["layers.1.mlp.up_proj.weight"])
    job.refuse(CheckpointError, "lacks the tensor 'layers.1.mlp.up_proj.weight'")


def test_hazard_06_a_tensor_that_belongs_to_nothing_is_named(job):
    job.write(extra={"layers.0.self_attn.g_proj.weight": np.zeros((4, HIDDEN), np.float32)})
    job.refuse(CheckpointError, "tensor 'layers.0.self_attn.g_proj.weight' does not belong to a DFlash2DraftModel")


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_hazard_09_biases_are_left_out_if_zero_and_refused_by_name_if_not(job, value):
    sizes = {"q": 64, "k": 32, "v": 32, "o": HIDDEN}
    biases = {
        f"layers.{layer}.self_attn.{part}_proj.bias": np.full(size, value, np.float32)
        for layer in range(2)
        for part, size in sizes.items()
    }
    job.write(attention_bias=True, extra=biases)
    if value:
        job.refuse(UnsupportedCheckpointError, "'layers.0.self_attn.q_proj.bias' is a bias that is not zero: an RMS")
        return
    notes, _, tensors = job.convert()
    assert "8 attention biases left out: all of them are zero." in notes
    assert len(tensors) == len(drafter_tensors(drafter_config(2)))


def test_hazard_10_mimos_folder_sinks_value_scale_and_half_rope_are_kept(job):
    sinks = {f"layers.{layer}.self_attn.attention_sink_bias": np.ones(4, np.float32) for layer in range(2)}
    job.write(1, extra=sinks, partial_rotary_factor=0.5, dflash_config={"attention_value_scale": 0.612})
    (job.drafter.parent / "MiMo").mkdir()
    job.drafter.rename(job.drafter.parent / "MiMo" / "dflash")
    job.drafter = job.drafter.parent / "MiMo"
    _, keys, tensors = job.convert()
    assert {"blk.0.attn_sinks.weight", "blk.1.attn_sinks.weight"} <= tensors
    assert keys["attention.value_scale"] == pytest.approx(0.612)
    assert keys["rope.dimension_count"] == 8


def test_hazard_10_a_mask_embedding_is_never_unpickled(job):
    job.write(1)
    (job.drafter / "mask_embedding.pt").write_bytes(b"cos\nmkdir\n(S'never'\ntR.")
    job.refuse(CheckpointError, "mask_embedding.pt is not a zip file as torch.save writes it")


def test_hazard_13_another_hidden_size_is_refused(job):
    make_target(job.target, hidden=128)
    job.write()
    job.refuse(TargetMismatchError, "its hidden size is 128, the drafter's 'hidden_size' 64")


def test_hazard_13_a_tap_beyond_the_target_is_refused(job):
    job.write(dflash_config={"target_layer_ids": [0, TARGET_LAYERS]})
    job.refuse(TargetMismatchError, f"it has {TARGET_LAYERS} layers, and 'target_layer_ids' taps layer {TARGET_LAYERS}")


def test_hazard_13_a_tap_of_the_last_layer_is_told_where_it_is_not_published(job):
    job.write(dflash_config={"target_layer_ids": [0, TARGET_LAYERS - 1]})
    notes, keys, _ = job.convert()
    assert keys["target_layers"] == (1, TARGET_LAYERS)
    published = "The drafter taps the last layer of the target, which stock llama.cpp does not publish for qwen3"
    assert any(note.startswith(published) for note in notes)


def test_hazard_08_llama3_rope_becomes_exact_factors(job):
    """`rope_freqs.weight` divides the frequencies as transformers' llama3 rope does."""
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    job.write(version=1, rope_scaling=scaling)
    _, keys, tensors = job.convert()
    assert "rope_freqs.weight" in tensors
    assert "rope.scaling.type" not in keys
    # theta 10000, 16 dimensions: wavelengths 2 pi 10000^(i/8); below 16 kept, above 64 slowed by 8, blended between.
    wavelengths = 2 * np.pi * 10000.0 ** (np.arange(8) / 8)
    blend = np.clip((64 / wavelengths - 1) / 3, 0, 1)
    written = GGUFReader(job.output)
    factors = next(tensor.data for tensor in written.tensors if tensor.name == "rope_freqs.weight")
    np.testing.assert_allclose(factors, 1 / ((1 - blend) / 8 + blend), rtol=1e-6)
    assert factors[0] == 1
    assert factors[-1] == 8


@pytest.mark.parametrize(
    ("scaling", "key"),
    [
        ({"rope_type": "longrope", "factor": 2.0}, "longrope"),
        ({"rope_type": "dynamic", "factor": 2.0}, "dynamic"),
        ({"rope_type": "yarn", "factor": 2.0, "beta_fast": 16}, "beta_fast"),
    ],
)
def test_hazard_08_a_rope_that_llama_cpp_would_not_compute_is_refused(job, scaling, key):
    job.write(version=1, rope_scaling=scaling)
    with pytest.raises(UnsupportedCheckpointError, match=key):
        job.convert()


@pytest.mark.parametrize("method", ["gptq", "awq", "auto-round", "quark", "bitsandbytes", "something"])
def test_hazard_11_a_quantisation_that_is_not_read_is_refused_by_name(job, method):
    job.write(quantization_config={"quant_method": method})
    with pytest.raises(UnsupportedCheckpointError, match=method):
        job.convert()


def test_hazard_11_fp8_weights_are_dequantised_with_their_scales(job):
    """8-bit code 0x38 is 1.0, 0x40 is 2.0 (E4M3); the scale of the whole matrix is 0.5."""
    name = "layers.0.mlp.up_proj"
    job.write(version=1, quantization_config={"quant_method": "fp8", "ignored_layers": ["fc"]})
    config = json.loads((job.drafter / "config.json").read_text())
    plain = drafter_tensors(config)
    shape = plain.pop(f"{name}.weight").shape
    others = [other for other in plain if other.endswith("_proj.weight")]
    config["quantization_config"]["ignored_layers"] += [other.removesuffix(".weight") for other in others]
    write_checkpoint(job.drafter, config, plain)
    codes = np.full(shape, 0x38, np.uint8)
    codes[0, 0] = 0x40
    parts = {f"{name}.weight": ("F8_E4M3", codes), f"{name}.weight_scale": ("F32", np.float32([0.5]))}
    (job.drafter / "model-fp8.safetensors").write_bytes(saved(parts))
    done = convert(job.drafter, job.target, job.output, outtype="f32")
    values = next(t.data for t in GGUFReader(done.output).tensors if t.name == "blk.0.ffn_up.weight")
    assert values[0, 0] == 1.0
    assert (values.ravel()[1:] == 0.5).all()


def test_hazard_14_hidden_states_beyond_f16_meet_no_f16_matrix(demo, tmp_path):
    """A lattice of finite scores from features of 10^5 in a file of type f16, and none with fc forced to F16."""
    native.silence()
    scores = {}
    for name, types in {"default": (), "forced": [("fc.weight", "f16")]}.items():
        drafter = tmp_path / f"{name}.gguf"
        convert(demo.drafter, demo.target, drafter, outtype="f16", tensor_types=types)
        scores[name] = lattice_of_large_features(demo.target, drafter)
    assert np.isfinite(scores["default"]).all()
    assert not np.isfinite(scores["forced"]).all()


def lattice_of_large_features(target_path, drafter_path):
    spec = read_pair(target_path, drafter_path)
    options = native.ContextOptions(n_ctx=256, n_batch=64, n_ubatch=64, n_threads=1, n_threads_batch=1)
    models = [native.Model(path, native.Placement()) for path in (target_path, drafter_path)]
    target = native.Context.open(models[0], options)
    drafter = native.Context.open(models[1], options, other=target, feature_width=spec.feature_width)
    drafter.set_causal(spec.causal)
    drafter.output_lattice()
    features = np.random.default_rng(0).normal(size=(8, spec.feature_width)) * 1e5
    drafter.decode_features(features.astype(np.float32), 0)
    rows = draft(drafter, np.full(spec.block_size, spec.mask_token, np.int32), 8, lattice=True).copy()
    for owned in (drafter, target, *models):
        owned.close()
    return rows
