"""MiMo's layout: a dflash folder inside the target's, sinks, value scale, half rope, a mask embedding of its own."""

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from dialect_pairs import assert_drafts_equal, drafted_blocks, make_f32_target  # noqa: E402
from factories import HEAD_DIM, HEADS, HIDDEN, MASK_TOKEN, drafter_config, write_checkpoint  # noqa: E402
from factories_dialects import lively_tensors, plain_drafter  # noqa: E402

from dflash2.converter import convert  # noqa: E402
from dflash2.converter.dialects.overrides import NO_OVERRIDES, Overrides  # noqa: E402
from dflash2.converter.dialects.table import read_config  # noqa: E402
from dflash2.errors import CheckpointError  # noqa: E402
from dflash2.gguf_info import read_gguf_info  # noqa: E402

WINDOW = 24


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return make_f32_target(tmp_path_factory.mktemp("target"))


# The two generations: V2.5 has `use_swa` and a second rope base, V2.6 names its layers.
GENERATIONS = {
    "V2.5": {
        "dflash_config": {"use_swa": True, "swa_window_size": WINDOW, "backbone_rotary_base": 5e6},
        "without": ["is_causal", "layer_types", "use_sliding_window"],
    },
    "V2.6": {"is_causal": False, "add_swa_attention_sink_bias": True},
}
RULES = {"window": (WINDOW,) * 2, "value_scale": 0.612, "rotated": HEAD_DIM // 2}


def mimo(version=1, generation="V2.6"):
    """Config and tensors of the published kind."""
    stated = dict(GENERATIONS[generation])
    draft = {"attention_sink_bias": True, "attention_value_scale": 0.612, **stated.pop("dflash_config", {})}
    config = drafter_config(
        version,
        dflash_config=draft,
        partial_rotary_factor=0.5,
        v_head_dim=HEAD_DIM,
        sliding_window=WINDOW,
        target_hidden_size=HIDDEN,
        **stated,
    )
    tensors = lively_tensors(config)
    random = np.random.default_rng(5)
    for layer in range(2):
        name = f"layers.{layer}.self_attn.attention_sink_bias"
        tensors[name] = random.normal(1, 1, HEADS).astype(np.float32)
    return config, tensors


def write_mimo(root, config, tensors):
    """The target's folder with `dflash/` in it: the weights under a name of their own, and an index."""
    root.mkdir(parents=True)
    (root / "config.json").write_text(json.dumps({"architectures": ["MiMoV2ForCausalLM"], "hidden_size": HIDDEN}))
    folder = write_checkpoint(root / "dflash", config, tensors, dtype="F32", stem="dflash_draft_model")
    weight_map = dict.fromkeys(tensors, "dflash_draft_model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("version", [1, 2])
def test_drafts_equal_the_reference(tmp_path, target, version, generation):
    config, tensors = mimo(version, generation)
    write_mimo(tmp_path / "MiMo", config, tensors)
    reference = plain_drafter(config, tensors, **RULES)
    overrides = Overrides(rope_theta=10000.0) if generation == "V2.5" else Overrides()
    conversion = assert_drafts_equal(target, tmp_path / "MiMo", reference, tmp_path, overrides=overrides)
    written = {tensor.name: (tensor.type_name, tensor.shape) for tensor in read_gguf_info(conversion.output).tensors}
    sinks = {name: kind for name, kind in written.items() if "sink" in name}
    assert sinks == {f"blk.{layer}.attn_sinks.weight": ("F32", (HEADS,)) for layer in range(2)}


def test_two_rope_bases_are_refused_until_the_user_says_which(tmp_path, target):
    config, tensors = mimo(1, "V2.5")
    folder = write_mimo(tmp_path / "MiMo", config, tensors)
    with pytest.raises(CheckpointError) as refused:
        convert(folder, target.path, tmp_path / "out.gguf")
    assert str(refused.value) == (
        f"{folder}/config.json: 'backbone_rotary_base' is 5e+06 and 'rope_theta' 10000, and runtimes disagree which of"
        " them the drafter ropes with; say which with --rope-theta, and keep the one that drafts better."
    )
    reference = plain_drafter(config, tensors, **RULES, theta=5e6)
    assert_drafts_equal(target, tmp_path / "MiMo", reference, tmp_path, overrides=Overrides(rope_theta=5e6))


def test_the_inner_folder_may_be_given_too(tmp_path, target):
    folder = write_mimo(tmp_path / "MiMo", *mimo())
    outer = convert(tmp_path / "MiMo", target.path, tmp_path / "outer.gguf")
    inner = convert(folder, target.path, tmp_path / "inner.gguf")
    assert outer.config == inner.config


def test_a_sink_changes_the_drafts(target):
    config, tensors = mimo()
    without = {name: values for name, values in tensors.items() if "sink" not in name}
    features, embeddings = target.features(list(range(2, 60)), (0, 2, 3)), target.embeddings[[5, 1, 1, 1]]
    rows = [plain_drafter(config, held).rows(features, embeddings) for held in (tensors, without)]
    assert float((rows[0] - rows[1]).abs().max()) > 1e-2


def test_sinks_of_some_layers_only_are_refused(tmp_path, target):
    config, tensors = mimo()
    del tensors["layers.1.self_attn.attention_sink_bias"]
    folder = write_mimo(tmp_path / "MiMo", config, tensors)
    with pytest.raises(CheckpointError, match=r"lacks the tensor 'layers\.1\.self_attn\.attention_sink_bias'"):
        convert(folder, target.path, tmp_path / "out.gguf")


def test_sinks_that_the_config_promises_are_missed(tmp_path, target):
    config, tensors = mimo()
    without = {name: values for name, values in tensors.items() if "sink" not in name}
    folder = write_mimo(tmp_path / "MiMo", config, without)
    with pytest.raises(CheckpointError, match=r"lacks the tensor 'layers\.0\.self_attn\.attention_sink_bias'"):
        convert(folder, target.path, tmp_path / "out.gguf")


VECTOR = torch.linspace(-1, 1, HIDDEN).to(torch.bfloat16)


@pytest.mark.parametrize(
    "saved",
    [{"mask_token_id": MASK_TOKEN, "embedding": VECTOR}, VECTOR, VECTOR[None]],
    ids=["dictionary", "vector", "row"],
)
def test_the_mask_embedding_is_read(tmp_path, saved):
    folder = write_mimo(tmp_path / "MiMo", *mimo())
    torch.save(saved, folder / "mask_embedding.pt")
    _, config = read_config(tmp_path / "MiMo", NO_OVERRIDES)
    assert config.mask_embedding == tuple(VECTOR.float().tolist())


@pytest.mark.parametrize("version", [1, 2])
def test_a_mask_embedding_is_drafted_with(tmp_path, target, version):
    """It replaces the mask token's row, so the drafter carries copies of the target's embeddings and head."""
    config, tensors = mimo(version)
    folder = write_mimo(tmp_path / "MiMo", config, tensors)
    torch.save({"mask_token_id": MASK_TOKEN, "embedding": VECTOR}, folder / "mask_embedding.pt")
    reference = plain_drafter(config, tensors, mask_embedding=VECTOR.float(), **RULES)
    done = assert_drafts_equal(target, tmp_path / "MiMo", reference, tmp_path)
    bare = drafted_blocks(target, done.output, plain_drafter(config, tensors, **RULES))
    assert any(block.ours != block.reference for block in bare)


WRONG = {
    "another token": ({"mask_token_id": 9, "embedding": VECTOR}, "is for the mask token 9, config.json names 1"),
    "no token": ({"embedding": VECTOR}, "is for the mask token None, config.json names 1"),
    "no vector": ({"mask_token_id": MASK_TOKEN}, "has no vector of 64 numbers"),
    "another size": (VECTOR[:-1], "has no vector of 64 numbers"),
    "integers": (torch.arange(HIDDEN), "has no vector of 64 numbers"),
    "not finite": (torch.full((HIDDEN,), float("nan")), "has values that are infinite or not a number"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_mask_embedding_is_refused(tmp_path, case):
    saved, message = WRONG[case]
    folder = write_mimo(tmp_path / "MiMo", *mimo())
    torch.save(saved, folder / "mask_embedding.pt")
    with pytest.raises(CheckpointError, match=message):
        read_config(folder, NO_OVERRIDES)
