"""z-lab's own layout: what a config can say beside the published values, drafted as the reference does."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from dialect_pairs import assert_drafts_equal, drafted_blocks, make_f32_target
from factories import drafter_config, write_checkpoint
from factories_dialects import lively_tensors, plain_drafter

from dflash2.converter import Overrides


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return make_f32_target(tmp_path_factory.mktemp("target"))


def checkpoint(tmp_path, version=2, **changes):
    config = drafter_config(version, **changes)
    tensors = lively_tensors(config)
    return config, tensors, write_checkpoint(tmp_path / "drafter", config, tensors, dtype="F32")


CASES = {
    "windows": ({}, {"window": (32, 32)}),
    "one sliding layer": (
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16},
        {"window": (16, None)},
    ),
    "causal": ({"is_causal": True}, {"window": (32, 32), "causal": (True, True)}),
    "causal by dflash_config": (
        {"without": ["is_causal"], "dflash_config": {"causal": True}},
        {"window": (32, 32), "causal": (True, True)},
    ),
    "sliding layers are causal": ({"without": ["is_causal"]}, {"window": (32, 32), "causal": (True, True)}),
    "window of every layer": (
        {"layer_types": ["full_attention"] * 2, "dflash_config": {"use_swa": True, "swa_window_size": 20}},
        {"window": (20, 20)},
    ),
    "taps out of order": ({"dflash_config": {"target_layer_ids": [3, 0, 2]}}, {"window": (32, 32)}),
    "a tap twice": ({"dflash_config": {"target_layer_ids": [2, 0, 2]}}, {"window": (32, 32)}),
    "scales": (
        {
            "dflash_config": {
                "input_embedding_scale": 8.0,
                "output_multiplier": 0.2,
                "final_logit_softcapping": 5.0,
            }
        },
        {"window": (32, 32), "embedding_scale": 8.0, "logit_scale": 0.2, "softcap": 5.0},
    ),
    "swish": ({"hidden_act": "swish"}, {"window": (32, 32)}),
    "half rope": ({"partial_rotary_factor": 0.5}, {"window": (32, 32), "rotated": 8}),
    "theta": ({"rope_theta": 1e6}, {"window": (32, 32)}),
    "epsilon": ({"rms_norm_eps": 1e-2}, {"window": (32, 32), "eps": 1e-2}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("version", [1, 2])
def test_drafts_equal_the_reference(tmp_path, target, version, case):
    changes, rules = CASES[case]
    config, tensors, folder = checkpoint(tmp_path, version, **changes)
    assert_drafts_equal(target, folder, plain_drafter(config, tensors, **rules), tmp_path)


@pytest.mark.parametrize(("window", "expected"), [(True, 16), (False, None)])
def test_user_settles_the_window(tmp_path, target, window, expected):
    config, tensors, folder = checkpoint(tmp_path, use_sliding_window=not window, sliding_window=16)
    reference = plain_drafter(config, tensors, window=(expected,) * 2)
    assert_drafts_equal(target, folder, reference, tmp_path, overrides=Overrides(sliding_window=window))


def test_user_may_drop_the_window_of_every_layer(tmp_path, target):
    config, tensors, folder = checkpoint(tmp_path, dflash_config={"use_swa": True, "swa_window_size": 20})
    overrides = Overrides(sliding_window=False)
    done = assert_drafts_equal(target, folder, plain_drafter(config, tensors), tmp_path, overrides=overrides)
    assert done.notes == ("By your choice: sliding layers get no window and keep their causality.",)


def test_user_settles_block_size_mask_and_taps(tmp_path, target):
    changes = {"block_size": 9, "mask_token_id": 7, "without": ["dflash_config.block_size"]}
    config, tensors, folder = checkpoint(tmp_path, dflash_config={"target_layer_ids": [1, 3, 4]}, **changes)
    settled = config["dflash_config"] | {"block_size": 5, "mask_token_id": 2, "target_layer_ids": [0, 2, 3]}
    reference = plain_drafter(config | {"dflash_config": settled}, tensors, window=(32, 32))
    overrides = Overrides(block_size=5, mask_token_id=2, tap_ids="inputs")
    assert_drafts_equal(target, folder, reference, tmp_path, overrides=overrides)


def test_gelu_of_the_tanh_kind_is_kept(tmp_path, target):
    """llama.cpp's CPU takes it from a table of F16 values, so a few near-ties may fall the other way."""
    config, tensors, folder = checkpoint(tmp_path, hidden_act="gelu_pytorch_tanh")
    reference = plain_drafter(config, tensors, window=(32, 32), activation="gelu_pytorch_tanh")
    conversion = assert_drafts_equal(target, folder, reference, tmp_path, least_equal=0.95)
    silu = plain_drafter(config, tensors, window=(32, 32))
    blocks = drafted_blocks(target, conversion.output, silu)
    assert sum(block.ours == block.reference for block in blocks) < 0.9 * len(blocks)
