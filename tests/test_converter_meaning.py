"""What a config means ends up in the file: windows, causality per kind of layer, rope, scales, warnings."""

from pathlib import Path

import numpy as np
import pytest
from factories import HEAD_DIM, make_drafter, make_target

from dflash2.converter import Conversion, Overrides, convert
from dflash2.gguf_info import GGUFInfo, read_gguf_info

FULL, SLIDING = "full_attention", "sliding_attention"
MIXED_NOTE = "stock llama.cpp has one flag and drafts worse"


def converted(folder: Path, version: int = 1, target: dict | None = None, **config: object) -> tuple[Conversion, dict]:
    """The conversion, and the metadata below `dflash.` without that prefix."""
    folder.mkdir(exist_ok=True)
    done = convert(
        make_drafter(folder / "drafter", version, **config),
        make_target(folder / "target.gguf", **(target or {})),
        folder / "out.gguf",
    )
    metadata = read_gguf_info(done.output).metadata
    return done, {key.removeprefix("dflash."): metadata[key] for key in metadata if key.startswith("dflash.")}


# Case -> (changes to config.json, causal, causal_swa, window, pattern); None where the key is absent.
CAUSALITY = {
    "is_causal false holds for every layer": ({"layer_types": [SLIDING, FULL]}, False, None, 32, (True, False)),
    "is_causal true holds for every layer": (
        {"layer_types": [SLIDING, FULL], "is_causal": True},
        True,
        None,
        32,
        (True, False),
    ),
    "is_causal wins over dflash_config.causal": (
        {"layer_types": [SLIDING, FULL], "dflash_config": {"causal": True}},
        False,
        None,
        32,
        (True, False),
    ),
    "dflash_config.causal holds when is_causal is absent": (
        {"layer_types": [SLIDING, FULL], "dflash_config": {"causal": True}, "without": ["is_causal"]},
        True,
        None,
        32,
        (True, False),
    ),
    "without a flag sliding layers are causal and full layers are not": (
        {"layer_types": [SLIDING, FULL], "without": ["is_causal"]},
        False,
        True,
        32,
        (True, False),
    ),
    "without a flag sliding layers alone are causal": ({"without": ["is_causal"]}, True, None, 32, (True, True)),
    "without a flag full layers alone are not causal": (
        {"layer_types": [FULL, FULL], "without": ["is_causal"]},
        False,
        None,
        None,
        None,
    ),
    "no layer types means full layers": (
        {"without": ["is_causal", "layer_types"]},
        False,
        None,
        None,
        None,
    ),
    "no layer types but a low max_window_layers": (
        {"max_window_layers": 1, "without": ["is_causal", "layer_types"]},
        False,
        True,
        32,
        (False, True),
    ),
    "use_swa puts a window on full layers and leaves them not causal": (
        {"dflash_config": {"use_swa": True, "swa_window_size": 16}, "without": ["is_causal", "layer_types"]},
        False,
        None,
        16,
        (True, True),
    ),
    "use_swa falls back to sliding_window": (
        {"dflash_config": {"use_swa": True}, "is_causal": True},
        True,
        None,
        32,
        (True, True),
    ),
    "use_sliding_window absent keeps the window": (
        {"without": ["use_sliding_window"]},
        False,
        None,
        32,
        (True, True),
    ),
    "use_sliding_window false drops the window and keeps the causality": (
        {"use_sliding_window": False, "without": ["is_causal"]},
        True,
        None,
        None,
        None,
    ),
    "windowless causal layers beside full ones get a window that never ends": (
        {"use_sliding_window": False, "layer_types": [SLIDING, FULL], "without": ["is_causal"]},
        False,
        True,
        256,
        (True, False),
    ),
}


@pytest.mark.parametrize("case", CAUSALITY)
def test_windows_and_causality(tmp_path, case):
    changes, causal, causal_swa, window, pattern = CAUSALITY[case]
    done, keys = converted(tmp_path, **changes)
    assert keys["attention.causal"] is causal
    assert keys.get("attention.causal_swa") is causal_swa
    assert keys.get("attention.sliding_window") == window
    assert keys.get("attention.sliding_window_pattern") == pattern
    assert (MIXED_NOTE in " ".join(done.notes)) == (causal_swa is not None)


def test_decisions_about_windows_are_told(tmp_path):
    kept, _ = converted(tmp_path / "kept", without=["use_sliding_window"])
    dropped, _ = converted(tmp_path / "dropped", use_sliding_window=False)
    assert kept.notes == ("'use_sliding_window' is absent: the window of 32 tokens is kept.",)
    assert dropped.notes == ("'use_sliding_window' is false: sliding layers get no window and keep their causality.",)


def test_top_level_serves_where_dflash_config_is_silent(tmp_path):
    done, keys = converted(
        tmp_path,
        block_size=12,
        mask_token_id=7,
        target_layer_ids=[1, 2],
        without=["dflash_config.block_size", "dflash_config.mask_token_id", "dflash_config.target_layer_ids"],
    )
    assert (keys["block_size"], keys["target_layers"]) == (12, (2, 3))
    assert read_gguf_info(done.output).metadata["tokenizer.ggml.mask_token_id"] == 7


def test_rope_theta_of_either_place(tmp_path):
    _, old = converted(tmp_path / "old", rope_theta=1e7)
    _, new = converted(
        tmp_path / "new", rope_parameters={"rope_theta": 5e5, "rope_type": "default"}, without=["rope_theta"]
    )
    assert (old["rope.freq_base"], new["rope.freq_base"]) == (1e7, 5e5)


def test_partial_rotary_factor_sets_the_rotated_dimensions(tmp_path):
    _, half = converted(tmp_path / "half", partial_rotary_factor=0.5)
    _, whole = converted(tmp_path / "whole", partial_rotary_factor=1.0)
    assert half["rope.dimension_count"] == HEAD_DIM // 2
    assert "rope.dimension_count" not in whole


def test_same_rope_for_both_kinds_of_layers_is_one_rope(tmp_path):
    rope = {"rope_theta": 1e6, "rope_type": "linear", "factor": 2.0}
    _, keys = converted(tmp_path, rope_parameters={FULL: rope, SLIDING: rope}, without=["rope_theta"])
    assert (keys["rope.freq_base"], keys["rope.scaling.type"], keys["rope.scaling.factor"]) == (1e6, "linear", 2.0)


def test_yarn_attention_factor_is_relative_to_what_llama_cpp_multiplies_by_itself(tmp_path):
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    _, plain = converted(tmp_path / "plain", rope_scaling=rope)
    _, given = converted(tmp_path / "given", rope_scaling=rope | {"attention_factor": 1.0})
    assert "rope.scaling.attn_factor" not in plain
    assert plain["rope.scaling.original_context_length"] == 64
    assert given["rope.scaling.attn_factor"] == pytest.approx(1 / (0.1 * np.log(4.0) + 1))


def rope_factors(info: GGUFInfo) -> np.ndarray:
    tensor = info.tensor("rope_freqs.weight")
    return np.frombuffer(info.path.read_bytes(), np.float32, tensor.shape[0], tensor.offset)


def test_llama3_rope_becomes_exact_frequency_factors(tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    done, keys = converted(tmp_path, rope_scaling=rope)
    settings = transformers.LlamaConfig(
        head_dim=HEAD_DIM, hidden_size=64, num_attention_heads=4, rope_parameters=rope | {"rope_theta": 10000.0}
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](settings, torch.device("cpu"))
    plain = 10000.0 ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    factors = rope_factors(read_gguf_info(done.output))
    np.testing.assert_allclose(plain / factors, scaled.numpy(), rtol=1e-6)
    assert (factors[0], factors[-1]) == (1.0, 8.0)
    assert 1.0 < factors[2] < 8.0
    assert "rope.scaling.type" not in keys


def test_scales_are_kept_and_a_zero_softcap_is_none(tmp_path):
    values = {"output_multiplier": 0.25, "final_logit_softcapping": 20, "input_embedding_scale": 8.0}
    _, keys = converted(tmp_path / "some", dflash_config=values)
    _, zero = converted(tmp_path / "zero", final_logit_softcapping=0)
    assert (keys["logit_scale"], keys["final_logit_softcapping"], keys["embedding_scale"]) == (0.25, 20.0, 8.0)
    assert "final_logit_softcapping" not in zero
    assert "logit_scale" not in zero


def test_dflash2_keys_are_written_both_or_neither(tmp_path):
    names = {"conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"}
    _, v1 = converted(tmp_path / "v1", 1)
    _, v2 = converted(tmp_path / "v2", 2)
    assert not names & v1.keys()
    assert {name: v2[name] for name in names} == {
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 32,
        "selector_top_k": 4,
    }


def test_target_that_publishes_no_layer_inputs_converts_with_a_warning(tmp_path):
    done, _ = converted(tmp_path, target={"architecture": "deepseek2"})
    assert done.notes == (
        "Stock llama.cpp publishes no layer inputs for deepseek2 targets: this pair cannot run on it.",
    )


def test_tap_at_the_last_layer_converts_with_a_warning_where_it_is_not_published(tmp_path):
    last = {"dflash_config": {"target_layer_ids": [0, 4]}}
    qwen, keys = converted(tmp_path / "qwen3", **last)
    nemotron, _ = converted(tmp_path / "nemotron", target={"architecture": "nemotron_h"}, **last)
    assert keys["target_layers"] == (1, 5)
    assert "does not publish for qwen3" in qwen.notes[0]
    assert nemotron.notes == ()


def test_another_number_of_target_layers_is_told(tmp_path):
    done, _ = converted(tmp_path, num_target_layers=36)
    assert done.notes == ("'num_target_layers' is 36, but the target has 5 layers: check the pair.",)


OVERRIDES = {
    "block size": (Overrides(block_size=6), {"without": ["block_size"]}, "dflash.block_size", 6),
    "block size against the checkpoint's": (Overrides(block_size=6), {}, "dflash.block_size", 6),
    "mask token": (Overrides(mask_token_id=0), {"without": ["mask_token_id"]}, "tokenizer.ggml.mask_token_id", 0),
    "window on": (Overrides(sliding_window=True), {"use_sliding_window": False}, "dflash.attention.sliding_window", 32),
    "window off": (Overrides(sliding_window=False), {}, "dflash.attention.sliding_window", None),
}


@pytest.mark.parametrize("case", OVERRIDES)
def test_what_the_user_says_goes_first(tmp_path, case):
    overrides, config, key, expected = OVERRIDES[case]
    done = convert(
        make_drafter(tmp_path / "drafter", 1, **config),
        make_target(tmp_path / "target.gguf"),
        tmp_path / "out.gguf",
        overrides=overrides,
    )
    assert read_gguf_info(done.output).metadata.get(key) == expected
