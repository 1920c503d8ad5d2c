"""Nemotron's drafters: no block size anywhere, and a scaled rope, kept as transformers computes it."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from dialect_pairs import assert_drafts_equal, make_f32_target  # noqa: E402
from factories import drafter_config, write_checkpoint  # noqa: E402
from factories_dialects import lively_tensors, plain_drafter  # noqa: E402

from dflash2.converter import Overrides, convert  # noqa: E402
from dflash2.errors import CheckpointError  # noqa: E402

BLOCK = 6
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 128.0,
        "original_max_position_embeddings": 32,
    },
    "yarn with an attention factor": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 1.5,
    },
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return make_f32_target(tmp_path_factory.mktemp("target"))


def nemotron(tmp_path, rope):
    config = drafter_config(
        1,
        layer_types=["full_attention"] * 2,
        rope_scaling=dict(rope),
        without=["block_size", "sliding_window", "use_sliding_window"],
    )
    tensors = lively_tensors(config)
    return config, tensors, write_checkpoint(tmp_path / "drafter", config, tensors, dtype="F32")


def scaled_rope(rope):
    """Frequencies and the factor of cos and sin, from transformers' own Qwen3."""
    settings = transformers.Qwen3Config(head_dim=16, max_position_embeddings=256, rope_parameters=dict(rope))
    module = transformers.models.qwen3.modeling_qwen3.Qwen3RotaryEmbedding(settings)
    return {"frequencies": module.inv_freq, "rope_factor": module.attention_scaling}


@pytest.mark.parametrize("kind", ROPES)
def test_drafts_equal_the_reference_with_the_block_size_that_the_user_gives(tmp_path, target, kind):
    config, tensors, folder = nemotron(tmp_path, ROPES[kind])
    whole = {**config, "dflash_config": {**config["dflash_config"], "block_size": BLOCK}}
    reference = plain_drafter(whole, tensors, **scaled_rope(ROPES[kind]))
    assert_drafts_equal(target, folder, reference, tmp_path, overrides=Overrides(block_size=BLOCK))


def test_without_a_block_size_it_is_refused(tmp_path, target):
    _, _, folder = nemotron(tmp_path, ROPES["yarn"])
    with pytest.raises(CheckpointError) as refused:
        convert(folder, target.path, tmp_path / "out.gguf")
    assert str(refused.value) == (
        f"{folder}/config.json: 'block_size' is missing; add the value the drafter was trained with, or give it with"
        " --block-size."
    )
    assert not (tmp_path / "out.gguf").exists()
