"""Bad input: one clear sentence that names the file, the key or the tensor, and nothing left on disk."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from factories import (
    HIDDEN,
    drafter_config,
    drafter_tensors,
    make_drafter,
    make_target,
    save_safetensors,
    write_checkpoint,
)
from gguf.constants import GGUFValueType
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash2.converter import convert
from dflash2.errors import (
    CheckpointError,
    Dflash2Error,
    GGUFError,
    OutputError,
    TargetMismatchError,
    UnsupportedCheckpointError,
)
from dflash2.gguf_info import read_gguf_info


@dataclass
class Job:
    """The three paths of a conversion; a case spoils one of them."""

    drafter: Path
    target: Path
    output: Path


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(make_drafter(tmp_path / "drafter"), make_target(tmp_path / "target.gguf"), tmp_path / "out.gguf")


def files_below(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


def assert_refused(job: Job, error: type[Dflash2Error], message: str) -> None:
    """`message` with {drafter}, {config} and {target} in it is the whole sentence, and no file comes or goes."""
    root = job.target.parent
    before = files_below(root)
    with pytest.raises(error) as caught:
        convert(job.drafter, job.target, job.output)
    assert type(caught.value) is error
    expected = message.format(
        drafter=job.drafter, config=job.drafter / "config.json", target=job.target, output=job.output
    )
    assert str(caught.value) == expected
    assert files_below(root) == before


def rewrite_config(job: Job, version: int = 2, **changes: object) -> None:
    (job.drafter / "config.json").write_text(json.dumps(drafter_config(version, **changes)))


def reshard(job: Job, index: bool = True) -> None:
    (job.drafter / "model.safetensors").unlink()
    config = drafter_config()
    write_checkpoint(job.drafter, config, drafter_tensors(config), shards=2, index=index)


def rewrite_tensors(job: Job, change: Callable[[dict], None], dtype: str = "BF16") -> None:
    tensors = drafter_tensors(drafter_config())
    change(tensors)
    save_safetensors(job.drafter / "model.safetensors", tensors, dtype)


# --- config.json

MISSING = "is missing; add the value the drafter was trained with."
CONFIG_CASES = {
    "mask_token_id": (
        {"without": ["mask_token_id"]},
        f"{{config}}: 'mask_token_id' {MISSING[:-1]}, or give it with --mask-token-id.",
    ),
    "block_size": (
        {"without": ["block_size"]},
        f"{{config}}: 'block_size' {MISSING[:-1]}, or give it with --block-size.",
    ),
    "target_layer_ids": ({"without": ["target_layer_ids"]}, f"{{config}}: 'target_layer_ids' {MISSING}"),
    "null counts as missing": ({"head_dim": None}, f"{{config}}: 'head_dim' {MISSING}"),
    "rope_theta": ({"without": ["rope_theta"]}, f"{{config}}: 'rope_theta' {MISSING}"),
    "no window": ({"without": ["sliding_window"]}, f"{{config}}: 'sliding_window' {MISSING}"),
    "conv without group": ({"without": ["conv_group_size"]}, f"{{config}}: 'conv_group_size' {MISSING}"),
    "no architecture": (
        {"without": ["architectures"]},
        "{config}: 'architectures' is missing; a drafter's config.json names its architecture there.",
    ),
    "two architectures": ({"architectures": ["A", "B"]}, "{config}: 'architectures' is not a list of one name."),
    "layers without end": (
        {"num_hidden_layers": 2**31 - 1, "without": ["layer_types"]},
        "{config}: 'num_hidden_layers' is 2147483647, not an integer from 1 to 512.",
    ),
    "text for a number": (
        {"hidden_size": "64"},
        "{config}: 'hidden_size' is \"64\", not an integer from 1 to 2147483647.",
    ),
    "truth for a number": (
        {"num_hidden_layers": True},
        "{config}: 'num_hidden_layers' is true, not an integer from 1 to 512.",
    ),
    "negative mask": (
        {"dflash_config": {"mask_token_id": -1}},
        "{config}: 'mask_token_id' is -1, not an integer from 0 to 2147483647.",
    ),
    "block of one": (
        {"block_size": 1, "dflash_config": {"block_size": 1}},
        "{config}: 'block_size' is 1, not an integer from 2 to 1024.",
    ),
    "block size of two minds": (
        {"block_size": 16, "dflash_config": {"block_size": 8}},
        "{config}: 'block_size' is 8 and 16 at different levels; correct one, or give it with --block-size.",
    ),
    "mask token of two minds": (
        {"mask_token_id": 3},
        "{config}: 'mask_token_id' is 1 and 3 at different levels; correct one, or give it with --mask-token-id.",
    ),
    "scale of zero": (
        {"dflash_config": {"output_multiplier": 0}},
        "{config}: 'output_multiplier' is 0.0, not a positive number.",
    ),
    "no taps": (
        {"dflash_config": {"target_layer_ids": []}},
        "{config}: 'target_layer_ids' is [], not a list of integers from 0.",
    ),
    "negative tap": (
        {"dflash_config": {"target_layer_ids": [0, -2]}},
        "{config}: 'target_layer_ids' is [0, -2], not a list of integers from 0.",
    ),
    "epsilon": ({"rms_norm_eps": 0}, "{config}: 'rms_norm_eps' is 0.0, not a positive number."),
    "flag as text": ({"is_causal": "no"}, "{config}: 'is_causal' is \"no\", not true or false."),
    "section as list": ({"rope_scaling": [1]}, "{config}: 'rope_scaling' is [1], not a JSON object."),
    "odd head": ({"head_dim": 15}, "{config}: 'head_dim' is 15, which is odd."),
    "heads": (
        {"num_key_value_heads": 3},
        "{config}: 'num_key_value_heads' is 3, which does not divide 4 attention heads.",
    ),
    "layer types": (
        {"layer_types": ["full_attention"]},
        "{config}: 'layer_types' is not a list of 2 names, one per layer.",
    ),
    "conv group": (
        {"dflash_config": {"conv_group_size": 48}},
        "{config}: 'conv_group_size' is 48, which does not divide 'hidden_size' 64.",
    ),
    "rotary fraction": (
        {"partial_rotary_factor": 1.5},
        "{config}: 'partial_rotary_factor' rotates 24 of 16 dimensions.",
    ),
    "two ropes": (
        {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"rope_type": "linear", "factor": 2}},
        "{config}: 'rope_scaling' differs from 'rope_parameters'; remove the one that is wrong.",
    ),
    "linear without factor": (
        {"rope_scaling": {"rope_type": "linear"}},
        f"{{config}}: 'rope_scaling.factor' {MISSING}",
    ),
    "yarn factor": (
        {"rope_scaling": {"rope_type": "yarn", "factor": -2}},
        "{config}: 'rope_scaling.factor' is -2.0, not a positive number.",
    ),
    "llama3 factors": (
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8,
                "low_freq_factor": 4,
                "high_freq_factor": 4,
                "original_max_position_embeddings": 64,
            }
        },
        "{config}: 'rope_scaling.low_freq_factor' is 4.0, not below 'high_freq_factor' 4.0.",
    ),
}


@pytest.mark.parametrize("case", CONFIG_CASES)
def test_bad_config_is_named(job, case):
    changes, message = CONFIG_CASES[case]
    rewrite_config(job, **changes)
    assert_refused(job, CheckpointError, message)


UNSUPPORTED_CASES = {
    "unknown architecture": (
        {"architectures": ["LlamaForCausalLM"]},
        "{config}: architecture 'LlamaForCausalLM' is not supported; known are DFlashDraftModel, DFlash2DraftModel,"
        " MuseGlimmerAssistantModel, Qwen3DFlashDraftModel, Qwen3DFlash2DraftModel, Qwen3DFlash2Model,"
        " DFlashSpeculator.",
    ),
    "activation": (
        {"hidden_act": "gelu"},
        "{config}: 'hidden_act' is 'gelu', and llama.cpp's is the tanh approximation; a drafter can have silu, swish,"
        " gelu_pytorch_tanh, gelu_new.",
    ),
    "value heads": (
        {"v_head_dim": 8},
        "{config}: 'v_head_dim' is 8 and 'head_dim' 16; llama.cpp's dflash graph has one size.",
    ),
    "quantised": (
        {"quantization_config": {"quant_method": "gptq"}},
        "{config}: the checkpoint is quantised with gptq, which is not read; convert the BF16, F16 or F32 original, or"
        " dequantise it with gptqmodel first.",
    ),
    "layer kind": (
        {"layer_types": ["full_attention", "linear_attention"]},
        "{config}: 'layer_types' names 'linear_attention'; a drafter has full_attention and sliding_attention.",
    ),
    "lattice": (
        {"dflash_config": {"selector_top_k": 8}},
        "{config}: 'selector_top_k' 8 needs a 'hidden_size' of at least 72 in llama.cpp, and it is 64.",
    ),
    "rope type": (
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2}},
        "{config}: rope type 'dynamic' cannot be kept; supported are default, linear, llama3, none, yarn.",
    ),
    "yarn beta": (
        {"rope_scaling": {"rope_type": "yarn", "factor": 2, "beta_fast": 16}},
        "{config}: yarn's 'beta_fast' is 16, but llama.cpp's dflash graph always uses 32.0.",
    ),
    "yarn truncate": (
        {"rope_scaling": {"rope_type": "yarn", "factor": 2, "truncate": False}},
        "{config}: yarn's 'truncate' is False, but llama.cpp's dflash graph always uses True.",
    ),
    "two ropes by kind": (
        {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}},
        "{config}: 'rope_parameters' differ between full and sliding layers; llama.cpp's drafters have one rope.",
    ),
    "partial interleaved": (
        {"partial_rotary_factor": 0.5, "rope_is_neox_style": False},
        "{config}: 'rope_is_neox_style' false together with 'partial_rotary_factor' cannot be kept in a drafter GGUF.",
    ),
    "use_swa with mixed kinds": (
        {
            "layer_types": ["full_attention", "sliding_attention"],
            "dflash_config": {"use_swa": True},
            "without": ["is_causal"],
        },
        "{config}: 'use_swa' with mixed 'layer_types' needs 'is_causal', or layers of one cache would differ.",
    ),
}


@pytest.mark.parametrize("case", UNSUPPORTED_CASES)
def test_what_a_drafter_gguf_cannot_say_is_refused_by_name(job, case):
    changes, message = UNSUPPORTED_CASES[case]
    rewrite_config(job, **changes)
    assert_refused(job, UnsupportedCheckpointError, message)


@pytest.mark.parametrize("text", ["{", "", "\x00", "[" * 100_000])
def test_invalid_json_is_named(job, text):
    (job.drafter / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=rf"^{re.escape(str(job.drafter))}/config\.json is not valid JSON \("):
        convert(job.drafter, job.target, job.output)


def test_json_that_is_no_object_is_named(job):
    (job.drafter / "config.json").write_text("[1, 2]")
    assert_refused(job, CheckpointError, "{config} is not a JSON object; download it again.")


# --- the folder and its safetensors files


def test_folder_without_config_is_named(job):
    (job.drafter / "config.json").unlink()
    message = "{drafter} has no config.json; give the folder of a drafter checkpoint."
    assert_refused(job, CheckpointError, message)


def test_drafter_path_that_is_no_folder_is_named(job):
    job.drafter = job.drafter / "model.safetensors"
    message = "{drafter} is not a folder; give the folder with config.json and the safetensors files."
    assert_refused(job, CheckpointError, message)


def test_folder_without_weights_is_named(job):
    (job.drafter / "model.safetensors").unlink()
    assert_refused(job, CheckpointError, "{drafter} has no .safetensors file.")


def test_pickled_weights_are_never_loaded(job):
    (job.drafter / "model.safetensors").rename(job.drafter / "pytorch_model.bin")
    message = (
        "{drafter} has no .safetensors file; pytorch_model.bin is a pickle, which is never loaded,"
        " save it as safetensors."
    )
    assert_refused(job, CheckpointError, message)


@pytest.mark.parametrize("index", [True, False])
def test_missing_shard_is_named(job, index):
    reshard(job, index)
    (job.drafter / "model-00002-of-00002.safetensors").unlink()
    named = " named in model.safetensors.index.json" if index else ""
    assert_refused(
        job, CheckpointError, f"{{drafter}} lacks the shard model-00002-of-00002.safetensors{named}; download it."
    )


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/x.safetensors", "a\\b.safetensors", "weights.bin", 3])
def test_index_cannot_lead_out_of_the_folder(job, name):
    index = job.drafter / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"fc.weight": name}}))
    message = f"{index} names {name!r}, which is not a safetensors file of the folder."
    assert_refused(job, CheckpointError, message)


def test_index_that_disagrees_with_the_shards_is_named(job):
    reshard(job)
    index = job.drafter / "model.safetensors.index.json"
    entries = json.loads(index.read_text())
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    name = next(name for name, file in entries["weight_map"].items() if file == second)
    entries["weight_map"][name] = first
    index.write_text(json.dumps(entries))
    message = f"{index} says that {first} holds the tensor {name!r}, but it does not; download both."
    assert_refused(job, CheckpointError, message)
    del entries["weight_map"][name]
    index.write_text(json.dumps(entries))
    message = f"{index} does not name the tensor {name!r} of {second}; download both again."
    assert_refused(job, CheckpointError, message)


def test_index_without_weight_map_is_named(job):
    index = job.drafter / "model.safetensors.index.json"
    index.write_text("{}")
    assert_refused(job, CheckpointError, f"{index} has no 'weight_map'; download it again.")


def test_truncated_weights_are_named(job):
    path = job.drafter / "model.safetensors"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-100])
    message = f"{path} is truncated: {size - 100} bytes instead of {size}; download it again."
    assert_refused(job, CheckpointError, message)


@pytest.mark.parametrize("size", [0, 7, 8, 40])
def test_weights_cut_in_the_header_are_named(job, size):
    path = job.drafter / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    message = f"{path} is truncated or not a safetensors file: its header does not fit; download it again."
    assert_refused(job, CheckpointError, message)


def test_missing_tensor_is_named(job):
    rewrite_tensors(job, lambda tensors: tensors.pop("layers.1.mlp.up_proj.weight"))
    message = "{drafter} lacks the tensor 'layers.1.mlp.up_proj.weight'; download its safetensors files again."
    assert_refused(job, CheckpointError, message)


@pytest.mark.parametrize("name", ["../../x", "fc.qweight"])
def test_unexpected_tensor_goes_before_a_missing_one(job, name):
    rewrite_tensors(job, lambda tensors: tensors.update({name: tensors.pop("fc.weight")}))
    message = (
        f"{job.drafter}/model.safetensors: tensor {name!r} does not belong to a DFlash2DraftModel of 2 layers;"
        " converting without it would change the drafter. Besides, the tensor 'fc.weight' is missing."
    )
    assert_refused(job, CheckpointError, message)


@pytest.mark.parametrize(
    "name", ["layers.2.mlp.up_proj.weight", "layers.0.self_attn.q_proj.bias", "candidate_selector.extra"]
)
def test_unexpected_tensor_is_never_ignored(job, name):
    rewrite_tensors(job, lambda tensors: tensors.update({name: np.zeros((4, 4), np.float32)}))
    message = (
        f"{job.drafter}/model.safetensors: tensor {name!r} does not belong to a DFlash2DraftModel of 2 layers;"
        " converting without it would change the drafter."
    )
    assert_refused(job, CheckpointError, message)


def test_selector_tensors_in_a_v1_checkpoint_are_never_ignored(job):
    rewrite_config(job, version=1)
    with pytest.raises(CheckpointError, match=r"does not belong to a DFlashDraftModel of 2 layers"):
        convert(job.drafter, job.target, job.output)


def test_tensor_of_another_shape_is_named(job):
    rewrite_tensors(job, lambda tensors: tensors.update({"fc.weight": np.zeros((HIDDEN, 2 * HIDDEN), np.float32)}))
    message = f"{job.drafter}/model.safetensors: tensor 'fc.weight' has shape [64, 128], config.json implies [64, 192]."
    assert_refused(job, CheckpointError, message)


@pytest.mark.parametrize("dtype", ["I8", "F64"])
def test_tensor_of_another_dtype_is_named(job, dtype):
    rewrite_tensors(job, lambda _: None, dtype)
    with pytest.raises(UnsupportedCheckpointError, match=rf"is stored as {dtype}; convert the BF16, F16 or F32"):
        convert(job.drafter, job.target, job.output)


def test_one_tensor_under_two_names_is_named(job):
    rewrite_tensors(job, lambda tensors: tensors.update({"model.fc.weight": tensors["fc.weight"]}))
    message = (
        "{drafter}: tensor 'fc.weight' appears twice, in model.safetensors and in model.safetensors;"
        " remove the file that does not belong."
    )
    assert_refused(job, CheckpointError, message)


# --- the target

TARGET_CASES = {
    "hidden size": ({"hidden": 96}, "its hidden size is 96, the drafter's 'hidden_size' 64"),
    "vocabulary": ({"vocab": 287}, "its vocabulary has 287 tokens, the drafter's 'vocab_size' is 288"),
    "taps": ({"layers": 3}, "it has 3 layers, and 'target_layer_ids' taps layer 3"),
    "prediction layers are no layers": (
        {"layers": 5, "metadata": {"qwen3.nextn_predict_layers": (2, GGUFValueType.UINT32, None)}},
        "it has 3 layers, and 'target_layer_ids' taps layer 3",
    ),
}


@pytest.mark.parametrize("case", TARGET_CASES)
def test_target_of_another_drafter_is_named(job, case):
    changes, problem = TARGET_CASES[case]
    make_target(job.target, **changes)
    assert_refused(job, TargetMismatchError, f"{{target}} is not the target of this drafter: {problem}.")


def test_mask_token_beyond_the_vocabulary_is_named(job):
    rewrite_config(job, dflash_config={"mask_token_id": 288})
    message = "{target} is not the target of this drafter: 'mask_token_id' is 288, beyond its 288 tokens."
    assert_refused(job, TargetMismatchError, message)


def test_llama3_factors_with_an_mrope_target_are_refused(job):
    rope = {
        "rope_type": "llama3",
        "factor": 8,
        "low_freq_factor": 1,
        "high_freq_factor": 4,
        "original_max_position_embeddings": 64,
    }
    rewrite_config(job, rope_scaling=rope)
    make_target(job.target, architecture="qwen35", mrope=True)
    message = "{target} uses M-RoPE, with which llama.cpp ignores the drafter's llama3 rope factors."
    assert_refused(job, UnsupportedCheckpointError, message)


def test_target_that_is_no_gguf_is_named(job):
    job.target.write_text("hello")
    assert_refused(job, GGUFError, "{target} is not a GGUF file; give the path of a .gguf model.")


def test_drafter_as_target_is_named(job):
    convert(job.drafter, job.target, job.output)
    job.target, job.output = job.output, job.output.with_name("again.gguf")
    message = "{target} is a drafter itself; give the GGUF of the model it drafts for."
    assert_refused(job, GGUFError, message)


def test_later_part_of_a_split_target_is_named(job):
    make_target(job.target, metadata={"split.no": (1, GGUFValueType.UINT16, None)})
    message = "{target} is part 2 of a split GGUF; give the first part, the file that ends in -00001-of-....gguf."
    assert_refused(job, GGUFError, message)


# --- the output


def test_output_that_is_a_folder_is_named(job):
    job.output.mkdir()
    assert_refused(job, OutputError, "{output} is a folder; give the path of the GGUF file to write.")


def test_output_in_a_folder_that_does_not_exist_is_named(job):
    job.output = job.output.parent / "none" / "out.gguf"
    message = f"Cannot write {{output}}: the folder {job.output.parent} does not exist; create it."
    assert_refused(job, OutputError, message)


@pytest.mark.parametrize("name", ["target.gguf", "drafter/config.json", "drafter/model.safetensors"])
def test_output_never_replaces_an_input(job, name):
    job.output = job.target.parent / name
    content = job.output.read_bytes()
    message = "Cannot write {output}: it is an input of this conversion; give another path."
    assert_refused(job, OutputError, message)
    assert job.output.read_bytes() == content


def test_output_that_is_a_link_to_an_input_never_replaces_it(job):
    job.output.symlink_to(job.target)
    assert_refused(job, OutputError, "Cannot write {output}: it is an input of this conversion; give another path.")


def test_output_folder_that_cannot_be_written_is_named(job):
    folder = Path("/proc/self")
    if not folder.is_dir():
        pytest.skip("needs a folder that even root cannot write to")
    with pytest.raises(OutputError, match=r"^Cannot write /proc/self/out\.gguf: .+\.$"):
        convert(job.drafter, job.target, folder / "out.gguf")


# --- half characters


def test_half_a_character_in_the_config_is_named(job):
    rewrite_config(job, _name_or_path="\udc80")
    sentence = "{config}: '_name_or_path' is not text (a lone surrogate); correct or remove it."
    assert_refused(job, CheckpointError, sentence)


def test_half_a_character_in_a_key_is_named(job):
    rewrite_config(job, rope_scaling={"\ud800": 1})
    sentence = "{config}: the key '\\ud800' is not text (a lone surrogate); correct or remove it."
    assert_refused(job, CheckpointError, sentence)


def test_character_spelled_as_two_halves_is_text(job):
    (job.drafter / "config.json").write_text(json.dumps(drafter_config(_name_or_path="owner/\U0001f600")))
    convert(job.drafter, job.target, job.output)
    assert read_gguf_info(job.output).metadata["general.name"] == "\U0001f600"


def test_half_a_character_in_the_card_is_named(job):
    (job.drafter / "README.md").write_text('---\nlicense: "\\uD800"\n---\n')
    sentence = "{drafter}/README.md: 'license' is not text (a lone surrogate); correct or remove it."
    assert_refused(job, CheckpointError, sentence)


# --- anything at all

TEXTS = st.text(st.characters(), max_size=8)  # halves of characters too, as JSON can spell them
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
OPTIONAL_KEYS = {"rope_parameters", "quantization_config", "_name_or_path", "use_swa", "causal", "num_target_layers"}
CONFIG_KEYS = sorted({*drafter_config(), *drafter_config()["dflash_config"], *OPTIONAL_KEYS})


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.dictionaries(st.sampled_from(CONFIG_KEYS), JSON_VALUES, min_size=1, max_size=3), nested=st.booleans())
def test_any_json_in_the_config_is_a_conversion_or_one_sentence(job, changes, nested):
    config = drafter_config()
    (config["dflash_config"] if nested else config).update(changes)
    (job.drafter / "config.json").write_text(json.dumps(config))
    try:
        convert(job.drafter, job.target, job.output)
    except Dflash2Error as error:
        assert str(error).endswith(".")
        assert "\n" not in str(error)
