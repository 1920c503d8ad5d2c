"""NeMo AutoModel exports: its stamps, its rules of causality and rope, and the folders it writes."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from dialect_pairs import assert_drafts_equal, make_f32_target
from factories import MASK_TOKEN, write_checkpoint
from factories_dialects import lively_tensors, nemo_config, plain_drafter

from dflash2.converter import convert
from dflash2.errors import CheckpointError, UnsupportedCheckpointError
from dflash2.gguf_info import read_gguf_info


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return make_f32_target(tmp_path_factory.mktemp("target"))


CASES = {
    "as stamped": ({}, {}),
    "sliding layers are bidirectional without is_causal": ({"without": ["is_causal"]}, {}),
    "JetSpec: dflash_config.causal goes before the stamped is_causal": (
        {"is_causal": False, "dflash_config": {"causal": True}},
        {"causal": (True, True)},
    ),
    "heads are rotated whole": ({"partial_rotary_factor": 0.5}, {}),
    "heads are rotated whole, leaked into rope_parameters": (
        {
            "rope_parameters": {
                "rope_theta": 10000.0,
                "rope_type": "default",
                "partial_rotary_factor": 0.25,
                "mrope_section": [1, 1, 0],
            }
        },
        {},
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("version", [1, 2])
def test_drafts_equal_the_reference(tmp_path, target, version, case):
    changes, rules = CASES[case]
    config = nemo_config(version, **changes)
    tensors = lively_tensors(config)
    folder = write_checkpoint(tmp_path / "drafter", config, tensors, dtype="F32")
    reference = plain_drafter(config, tensors, **{"window": (32, 32), **rules})
    conversion = assert_drafts_equal(target, folder, reference, tmp_path)
    rotated = "'partial_rotary_factor' is the target's: this trainer rotates whole heads, and so does the drafter."
    assert conversion.notes == ((rotated,) if "rotated" in case else ())


def test_the_serving_name_with_flat_keys_is_read(tmp_path, target):
    config = nemo_config(2, architectures=["Qwen3DFlash2Model"])
    tensors = lively_tensors(config)
    flat = {**config, **config["dflash_config"]}
    del flat["dflash_config"]
    folder = write_checkpoint(tmp_path / "drafter", flat, tensors, dtype="F32")
    assert_drafts_equal(target, folder, plain_drafter(config, tensors, window=(32, 32)), tmp_path)


def sharded(folder, tensors, holes=()):
    """A distributed checkpoint of two writers: config apart, files named by writer and place."""
    write_checkpoint(folder / ".hf_metadata", nemo_config(2), {"unused": tensors["norm.weight"]}, dtype="F32")
    (folder / ".hf_metadata" / "model.safetensors").unlink()
    names = list(tensors)
    for place in (1, 2):
        if place not in holes:
            held = {name: tensors[name] for name in names[place - 1 :: 2]}
            stem = f"shard-{place:05d}-model-{place:05d}-of-00002"
            write_checkpoint(folder, nemo_config(2), held, dtype="F32", stem=stem)
            (folder / "config.json").unlink()
    return folder


LAYOUTS = {
    "consolidated": lambda step, tensors: write_checkpoint(
        step / "model" / "consolidated", nemo_config(2), tensors, dtype="F32", shards=2
    ),
    "sharded": lambda step, tensors: sharded(step / "model", tensors),
    "the model folder itself": sharded,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_folders_of_a_training_step_are_read(tmp_path, target, layout):
    tensors = lively_tensors(nemo_config(2))
    step = tmp_path / "epoch_0_step_100"
    LAYOUTS[layout](step, tensors)
    convert(step, target.path, tmp_path / "out.gguf", outtype="f32")
    written = read_gguf_info(tmp_path / "out.gguf")
    assert written.metadata["tokenizer.ggml.mask_token_id"] == MASK_TOKEN
    assert len(written.tensors) == len(tensors)


def test_a_missing_shard_is_named(tmp_path, target):
    folder = sharded(tmp_path / "model", lively_tensors(nemo_config(2)), holes=[2])
    with pytest.raises(CheckpointError, match=r"lacks the shard model-00002-of-00002\.safetensors"):
        convert(folder, target.path, tmp_path / "out.gguf")


def test_a_slice_of_a_tensor_is_not_taken_for_the_tensor(tmp_path, target):
    tensors = lively_tensors(nemo_config(2))
    tensors["fc.weight"] = tensors["fc.weight"][:32]
    folder = sharded(tmp_path / "model", tensors)
    with pytest.raises(CheckpointError, match=r"tensor 'fc\.weight' has shape \[32, 192\], config\.json implies"):
        convert(folder, target.path, tmp_path / "out.gguf")


PROJECTORS = {
    "domino": "is a Domino drafter, whose GRU head corrects the logits token by token; draft with a DFlash or DFlash 2",
    "causal_v5": "is a Domino drafter, whose GRU head corrects the logits token by token; draft with a DFlash or",
    "dspark": "is a DSpark drafter, another method with a Markov head; convert it with upstream's converter",
    "other": "has a head that is not known; draft with a DFlash or DFlash 2 drafter of the same target",
}


@pytest.mark.parametrize("projector", PROJECTORS)
def test_other_heads_on_a_dflash_architecture_are_refused_by_their_projector(tmp_path, target, projector):
    config = nemo_config(1, dflash_config={"projector_type": projector})
    folder = write_checkpoint(tmp_path / "drafter", config, lively_tensors(config))
    with pytest.raises(UnsupportedCheckpointError) as refused:
        convert(folder, target.path, tmp_path / "out.gguf")
    sentence = f"{folder}/config.json: the drafter of 'projector_type' {projector!r} {PROJECTORS[projector]}"
    assert str(refused.value).startswith(sentence)
