"""Drafters of gpt-oss: attention biases, left out where they are zero and refused by name where they are not."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from dialect_pairs import assert_drafts_equal, make_f32_target  # noqa: E402
from factories import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, drafter_config, write_checkpoint  # noqa: E402
from factories_dialects import lively_tensors, plain_drafter  # noqa: E402

from dflash2.converter import convert  # noqa: E402
from dflash2.errors import CheckpointError, UnsupportedCheckpointError  # noqa: E402

SIZES = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM, "o": HIDDEN}
NORMED = "an RMS norm follows the addition, so it cannot be folded into a weight"
CONSTANT = "it adds a constant vector to the residual, for which llama.cpp's dflash graph has no tensor"


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return make_f32_target(tmp_path_factory.mktemp("target"))


def gpt_oss(version=1, **biases):
    """Config and tensors with zero biases, but for those given as PART=value of its last element in layer 1."""
    config = drafter_config(
        version,
        attention_bias=True,
        model_type="gpt_oss",
        layer_types=["full_attention"] * 2,
        without=["is_causal", "sliding_window", "use_sliding_window"],
    )
    tensors = lively_tensors(config)
    for layer in range(2):
        for part, size in SIZES.items():
            tensors[f"layers.{layer}.self_attn.{part}_proj.bias"] = np.zeros(size, np.float32)
    for part, value in biases.items():
        tensors[f"layers.1.self_attn.{part}_proj.bias"][-1] = value
    return config, tensors


@pytest.mark.parametrize("version", [1, 2])
def test_zero_biases_are_left_out_exactly(tmp_path, target, version):
    config, tensors = gpt_oss(version)
    folder = write_checkpoint(tmp_path / "drafter", config, tensors, dtype="F32")
    conversion = assert_drafts_equal(target, folder, plain_drafter(config, tensors), tmp_path)
    assert conversion.notes == ("8 attention biases left out: all of them are zero.",)


@pytest.mark.parametrize(("part", "reason"), [("q", NORMED), ("k", NORMED), ("v", CONSTANT), ("o", CONSTANT)])
def test_any_other_bias_is_refused_with_the_reason(tmp_path, target, part, reason):
    config, tensors = gpt_oss(**{part: 0.25})
    folder = write_checkpoint(tmp_path / "drafter", config, tensors)
    with pytest.raises(UnsupportedCheckpointError) as refused:
        convert(folder, target.path, tmp_path / "out.gguf")
    assert str(refused.value) == (
        f"{folder}/model.safetensors: tensor 'layers.1.self_attn.{part}_proj.bias' is a bias that is not zero:"
        f" {reason}. Draft with a drafter trained without 'attention_bias'."
    )
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.parametrize("part", ["q", "v"])
def test_a_bias_changes_the_drafts(target, part):
    """Leaving it out would be a silent change: the reference proposes something else."""
    config, tensors = gpt_oss(**{part: 4.0})
    without = {name: values for name, values in tensors.items() if not name.endswith(".bias")}
    features = target.features(list(range(2, 60)), (0, 2, 3))
    embeddings = target.embeddings[[5, 1, 1, 1]]
    rows = [plain_drafter(config, held).rows(features, embeddings) for held in (tensors, without)]
    assert float((rows[0] - rows[1]).abs().max()) > 1e-2


def test_a_missing_bias_is_named(tmp_path, target):
    config, tensors = gpt_oss()
    del tensors["layers.0.self_attn.v_proj.bias"]
    folder = write_checkpoint(tmp_path / "drafter", config, tensors)
    with pytest.raises(CheckpointError, match=r"lacks the tensor 'layers\.0\.self_attn\.v_proj\.bias'"):
        convert(folder, target.path, tmp_path / "out.gguf")


def test_biases_that_the_config_does_not_announce_are_refused(tmp_path, target):
    config, tensors = gpt_oss()
    folder = write_checkpoint(tmp_path / "drafter", config | {"attention_bias": False}, tensors)
    with pytest.raises(CheckpointError, match=r"tensor 'layers\.0\.self_attn\.q_proj\.bias' does not belong"):
        convert(folder, target.path, tmp_path / "out.gguf")
