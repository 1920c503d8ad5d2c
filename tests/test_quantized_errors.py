"""Quantised checkpoints that are damaged, contradict themselves or are not read: one sentence, no traceback."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from factories_parts import MODULE, Tensors, read_all
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash2.errors import CheckpointError, Dflash2Error, UnsupportedCheckpointError

ROWS, COLUMNS = 6, 40


def scheme(format_name: str, **weights: object) -> dict:
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "symmetric": True, **weights}}
    return {"quant_method": "compressed-tensors", "format": format_name, "config_groups": {"group_0": group}}


def int4_parts() -> Tensors:
    return {
        "weight_packed": ("I32", np.zeros((ROWS, COLUMNS // 8), np.int32)),
        "weight_scale": ("F32", np.ones((ROWS, COLUMNS // 8), np.float32)),
        "weight_shape": ("I64", np.array([ROWS, COLUMNS], np.int64)),
    }


def zero_points() -> Tensors:
    return int4_parts() | {"weight_zero_point": ("I32", np.zeros((1, COLUMNS // 8), np.int32))}


def fp8_parts() -> Tensors:
    return {
        "weight": ("F8_E4M3", np.full((ROWS, COLUMNS), 0x38, np.uint8)),
        "weight_scale_inv": ("F32", np.ones((3, 5), np.float32)),
    }


def nvfp4_parts() -> Tensors:
    return {
        "weight_packed": ("U8", np.zeros((ROWS, 16), np.uint8)),
        "weight_scale": ("F8_E4M3", np.full((ROWS, 2), 0x38, np.uint8)),
        "weight_global_scale": ("F32", np.ones(1, np.float32)),
    }


def modelopt_parts() -> Tensors:
    return {
        "weight": ("U8", np.zeros((ROWS, 16), np.uint8)),
        "weight_scale": ("F8_E4M3", np.full((ROWS, 2), 0x38, np.uint8)),
        "weight_scale_2": ("F32", np.ones((), np.float32)),
    }


INT4 = scheme("pack-quantized", strategy="group", group_size=8)
ASYMMETRIC = scheme("pack-quantized", strategy="group", group_size=8, symmetric=False)
REORDERED = scheme("pack-quantized", strategy="group", group_size=8, actorder="group")
NVFP4 = scheme("nvfp4-pack-quantized", strategy="tensor_group", group_size=16, type="float")
FP8 = {"quant_method": "fp8", "weight_block_size": [2, 8]}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}


@pytest.mark.parametrize(
    ("quantization", "parts"),
    [
        (INT4, int4_parts()),
        (ASYMMETRIC, zero_points()),
        (NVFP4, nvfp4_parts()),
        (FP8, fp8_parts()),
        (MODELOPT, modelopt_parts()),
    ],
    ids=["int4", "asymmetric", "nvfp4", "fp8", "modelopt"],
)
def test_the_undamaged_checkpoints_are_read(tmp_path, quantization, parts):
    (values,) = read_all(tmp_path, quantization, parts)
    assert len(values) == ROWS
    assert np.unique(values).size == 1


def test_a_block_far_larger_than_the_matrix_is_one_scale(tmp_path):
    """And takes no more memory than the matrix."""
    parts = fp8_parts() | {"weight_scale_inv": ("F32", np.full((1, 1), 0.5, np.float32))}
    huge = {"quant_method": "fp8", "weight_block_size": [2**31 - 1, 2**31 - 1]}
    (values,) = read_all(tmp_path, huge, parts)
    assert values.shape == (ROWS, COLUMNS)
    assert (values == 0.5).all()


def without(parts: Tensors, name: str) -> Tensors:
    return {part: tensor for part, tensor in parts.items() if part != name}


def shaped(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


# name: (quantization_config, parts, error, message); {file} and {config} are paths, {name} the module.
DAMAGED: dict[str, tuple[dict, Tensors, str]] = {
    "missing scale": (
        INT4,
        without(int4_parts(), "weight_scale"),
        "{file}: tensor '{name}.weight_packed' has no '{name}.weight_scale' beside it; download the checkpoint again.",
    ),
    "missing scale of an unpacked weight": (
        FP8,
        without(fp8_parts(), "weight_scale_inv"),
        "{file}: tensor '{name}.weight' is stored as F8_E4M3 and has no scale beside it; download the checkpoint"
        " again.",
    ),
    "missing shape": (
        INT4,
        without(int4_parts(), "weight_shape"),
        "{file}: tensor '{name}.weight_packed' has no '{name}.weight_shape' beside it; download the checkpoint again.",
    ),
    "missing weight": (
        FP8,
        without(fp8_parts(), "weight"),
        "{file}: tensor '{name}.weight_scale_inv' has no '{name}.weight' beside it; download the checkpoint again.",
    ),
    "missing group indices": (
        REORDERED,
        int4_parts(),
        "{file}: tensor '{name}.weight_packed' has no '{name}.weight_g_idx' beside it; download the checkpoint again.",
    ),
    "missing zero points": (
        ASYMMETRIC,
        int4_parts(),
        "{file}: tensor '{name}.weight_packed' has no '{name}.weight_zero_point' beside it; download the checkpoint"
        " again.",
    ),
    "part of another format": (
        INT4,
        int4_parts() | {"weight_global_scale": ("F32", shaped(1))},
        "{file}: tensor '{name}.weight_global_scale' does not belong to the format that the configuration names;"
        " converting without it would change the drafter.",
    ),
    "zero points of symmetric weights": (
        INT4,
        zero_points(),
        "{file}: tensor '{name}.weight_zero_point' does not belong to the format that the configuration names;"
        " converting without it would change the drafter.",
    ),
    "plain weight beside a packed one": (
        INT4,
        int4_parts() | {"weight": ("F32", shaped(ROWS, COLUMNS))},
        "{file}: tensor '{name}.weight' does not belong to the format that the configuration names;"
        " converting without it would change the drafter.",
    ),
    "scale of another shape": (
        INT4,
        int4_parts() | {"weight_scale": ("F32", shaped(ROWS, 4))},
        "{file}: tensor '{name}.weight_scale' has shape [6, 4], the weight beside it implies [6, 5]; download the"
        " checkpoint again.",
    ),
    "block scales of another shape": (
        FP8,
        fp8_parts() | {"weight_scale_inv": ("F32", shaped(3, 4))},
        "{file}: tensor '{name}.weight_scale_inv' has shape [3, 4], the weight beside it implies [3, 5]; download the"
        " checkpoint again.",
    ),
    "scale of integers": (
        INT4,
        int4_parts() | {"weight_scale": ("I32", np.ones((ROWS, 5), np.int32))},
        "{file}: tensor '{name}.weight_scale' is stored as I32 instead of F32 or F16 or BF16; the checkpoint is not of"
        " the format its configuration names.",
    ),
    "weight of another dtype": (
        FP8,
        fp8_parts() | {"weight": ("F8_E5M2", np.zeros((ROWS, COLUMNS), np.uint8))},
        "{file}: tensor '{name}.weight' is stored as F8_E5M2 instead of F8_E4M3; the checkpoint is not of the format"
        " its configuration names.",
    ),
    "scale that is infinite": (
        INT4,
        int4_parts() | {"weight_scale": ("F32", np.full((ROWS, 5), np.inf, np.float32))},
        "{file}: tensor '{name}.weight_scale' has a scale that is not finite; the checkpoint is damaged, download it"
        " again.",
    ),
    "scale that is not a number": (
        NVFP4,
        nvfp4_parts() | {"weight_scale": ("F8_E4M3", np.full((ROWS, 2), 0x7F, np.uint8))},
        "{file}: tensor '{name}.weight_scale' has a scale that is not finite; the checkpoint is damaged, download it"
        " again.",
    ),
    "global scale of zero": (
        NVFP4,
        nvfp4_parts() | {"weight_global_scale": ("F32", np.zeros(1, np.float32))},
        "{file}: tensor '{name}.weight_global_scale' is 0.0, which is no scale; the checkpoint is damaged.",
    ),
    "second scale that is not a number": (
        MODELOPT,
        modelopt_parts() | {"weight_scale_2": ("F32", np.full((), np.nan, np.float32))},
        "{file}: tensor '{name}.weight_scale_2' is nan, which is no scale; the checkpoint is damaged.",
    ),
    "global scale for each row": (
        NVFP4,
        nvfp4_parts() | {"weight_global_scale": ("F32", shaped(ROWS))},
        "{file}: tensor '{name}.weight_global_scale' has shape [6] instead of one value; the checkpoint is damaged,"
        " quantise it again.",
    ),
    "absurd shape": (
        INT4,
        int4_parts() | {"weight_shape": ("I64", np.array([2**62, 2**62], np.int64))},
        "{file}: tensor '{name}.weight_shape' says [4611686018427387904, 4611686018427387904], which does not fit the"
        " shape [6, 5] of '{name}.weight_packed'; download the checkpoint again.",
    ),
    "negative shape": (
        INT4,
        int4_parts() | {"weight_shape": ("I64", np.array([ROWS, -8], np.int64))},
        "{file}: tensor '{name}.weight_shape' says [6, -8], which does not fit the shape [6, 5] of"
        " '{name}.weight_packed'; download the checkpoint again.",
    ),
    "shape of three": (
        INT4,
        int4_parts() | {"weight_shape": ("I64", np.array([1, 6, 40], np.int64))},
        "{file}: tensor '{name}.weight_shape' has shape [3], the weight beside it implies [2]; download the checkpoint"
        " again.",
    ),
    "group that does not divide": (
        scheme("pack-quantized", strategy="group", group_size=7),
        int4_parts(),
        "{file}: tensor '{name}.weight_packed' has 40 columns, which groups of 7"
        " ('quantization_config.config_groups.group_0.weights.group_size') do not divide.",
    ),
    "group index out of range": (
        REORDERED,
        int4_parts() | {"weight_g_idx": ("I32", np.arange(COLUMNS, dtype=np.int32))},
        "{file}: tensor '{name}.weight_g_idx' does not name each of 5 groups; download it again.",
    ),
    "group index that is partly unset": (
        REORDERED,
        int4_parts() | {"weight_g_idx": ("I32", np.append(np.arange(COLUMNS - 1) // 8, -1).astype(np.int32))},
        "{file}: tensor '{name}.weight_g_idx' does not name each of 5 groups; download it again.",
    ),
    "no algorithm": (
        {"quant_method": "modelopt"},
        modelopt_parts(),
        "{file}: tensor '{name}.weight_scale' is quantised, but {config} has no 'quantization_config.quant_algo';"
        " download both again.",
    ),
    "no group for weights": (
        INT4 | {"config_groups": {"group_0": {"targets": ["Linear"], "weights": None}}},
        int4_parts(),
        "{file}: tensor '{name}.weight_packed' is quantised, but 0 groups of 'config_groups' in {config} name it"
        " instead of one.",
    ),
    "ignored but quantised": (
        INT4 | {"ignore": [f"re:.*{MODULE[-9:]}"]},
        int4_parts(),
        "{file}: tensor '{name}.weight_packed' is quantised, but 'quantization_config.ignore' of config.json says it is"
        " not; download both again.",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_checkpoints_are_refused(tmp_path, case):
    quantization, parts, message = DAMAGED[case]
    assert_sentence(tmp_path, lambda: read_all(tmp_path, quantization, parts), CheckpointError, message)


BY_NAME = "{config}: the checkpoint is quantised with %s, which is not read; convert the BF16, F16 or F32 original, or"
UNREAD: dict[str, tuple[dict, Tensors, str]] = {
    "gptq": ({"quant_method": "gptq"}, {}, BY_NAME % "gptq" + " dequantise it with gptqmodel first."),
    "awq": ({"quant_method": "awq"}, {}, BY_NAME % "awq" + " dequantise it with gptqmodel first."),
    "auto-round": (
        {"quant_method": "auto-round"},
        {},
        BY_NAME % "auto-round" + " dequantise it with auto-round first.",
    ),
    "quark": ({"quant_method": "quark"}, {}, BY_NAME % "quark" + " dequantise it with amd-quark first."),
    "bitsandbytes": (
        {"quant_method": "bitsandbytes"},
        {},
        BY_NAME % "bitsandbytes" + " dequantise it with transformers and bitsandbytes first.",
    ),
    "mxfp4": ({"quant_method": "mxfp4"}, {}, BY_NAME % "mxfp4" + " dequantise it with transformers first."),
    "unknown method": (
        {"quant_method": "q9"},
        {},
        "{config}: the quantisation method 'q9' is not known (known: compressed-tensors, fp8, modelopt, modelopt_fp4,"
        " modelopt_mixed); convert the BF16, F16 or F32 original.",
    ),
    "unknown format": (
        scheme("marlin-24", strategy="channel"),
        {},
        "{config}: the format 'marlin-24' of compressed-tensors is not read (known: pack-quantized, int-quantized,"
        " float-quantized, naive-quantized, nvfp4-pack-quantized, mxfp4-pack-quantized, mxfp8-quantized); dequantise"
        " the checkpoint with compressed-tensors first, or convert the original.",
    ),
    "three bits": (
        scheme("pack-quantized", strategy="group", group_size=8, num_bits=3),
        int4_parts(),
        "{file}: tensor '{name}.weight_packed' is int3 in the format pack-quantized, which is not read (int4 or int8"
        " is); convert the original.",
    ),
    "rotated weights": (
        INT4 | {"transform_config": {"config_groups": {"R1": {}}}},
        {},
        "{config}: 'quantization_config.transform_config' changes how weights are stored, which is not read; dequantise"
        " the checkpoint with compressed-tensors first, or convert the original.",
    ),
    "sparse weights": (
        INT4 | {"sparsity_config": {"format": "sparse-24-bitmask"}},
        {},
        "{config}: 'quantization_config.sparsity_config' changes how weights are stored, which is not read; dequantise"
        " the checkpoint with compressed-tensors first, or convert the original.",
    ),
    "algorithm of modelopt": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"},
        {},
        "{config}: 'quantization_config.quant_algo' 'NVFP4_AWQ' of modelopt is not read (known: FP8,"
        " FP8_PER_CHANNEL_PER_TOKEN, NVFP4, W4A16_NVFP4); convert the BF16 original.",
    ),
    "stack of matrices": (
        FP8,
        fp8_parts() | {"weight": ("F8_E4M3", np.zeros((2, ROWS, COLUMNS), np.uint8))},
        "{file}: tensor '{name}.weight' has shape [2, 6, 40]; only matrices are dequantised.",
    ),
    "empty matrix": (
        FP8,
        fp8_parts() | {"weight": ("F8_E4M3", np.zeros((0, COLUMNS), np.uint8))},
        "{file}: tensor '{name}.weight' has shape [0, 40]; only matrices are dequantised.",
    ),
}


@pytest.mark.parametrize("case", UNREAD)
def test_what_is_not_read_is_refused_by_name(tmp_path, case):
    quantization, parts, message = UNREAD[case]
    assert_sentence(tmp_path, lambda: read_all(tmp_path, quantization, parts), UnsupportedCheckpointError, message)


def assert_sentence(folder: Path, call: Callable[[], object], error: type[Dflash2Error], message: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error
    names = {"file": folder / "model.safetensors", "config": folder / "config.json", "name": MODULE}
    assert str(caught.value) == message.format(**names)


WRONG_KEYS: dict[str, tuple[dict, str]] = {
    "group size of zero": (
        scheme("pack-quantized", strategy="group", group_size=0),
        "'quantization_config.config_groups.group_0.weights.group_size' is 0, and strategy 'group' needs a positive"
        " one.",
    ),
    "group without a size": (
        scheme("pack-quantized", strategy="group"),
        "'quantization_config.config_groups.group_0.weights.group_size' is None, and strategy 'group' needs a positive"
        " one.",
    ),
    "block of zero": (
        scheme("float-quantized", type="float", num_bits=8, strategy="block", block_structure=[0, 128]),
        "'quantization_config.config_groups.group_0.weights.block_structure' is [0, 128], not two positive sizes.",
    ),
    "strategy of activations": (
        scheme("int-quantized", strategy="token"),
        "'quantization_config.config_groups.group_0.weights.strategy' is 'token', which is not a strategy of stored"
        " weights.",
    ),
    "block size of one number": (
        {"quant_method": "fp8", "weight_block_size": [128]},
        "'quantization_config.weight_block_size' is [128], not two positive sizes.",
    ),
    "no method": ({"bits": 4}, "'quantization_config.quant_method' is missing; convert the BF16, F16 or F32 original."),
    "no format": (
        {"quant_method": "compressed-tensors", "config_groups": INT4["config_groups"]},
        "'quantization_config.format' is missing; download it again.",
    ),
}


@pytest.mark.parametrize("case", WRONG_KEYS)
def test_wrong_keys_are_named(tmp_path, case):
    quantization, message = WRONG_KEYS[case]
    assert_sentence(tmp_path, lambda: read_all(tmp_path, quantization, {}), CheckpointError, "{config}: " + message)


def test_a_pattern_that_is_none_is_named(tmp_path):
    call = lambda: read_all(tmp_path, INT4 | {"ignore": ["re:("]}, int4_parts())  # noqa: E731
    with pytest.raises(CheckpointError, match=r"'re:\(' is not a regular expression \(missing \).+\)\.$"):
        call()


def test_quantised_tensors_without_a_description_are_refused(tmp_path):
    message = (
        "{file}: tensor '{name}.weight_packed' belongs to a quantised weight, but neither config.json nor"
        f" hf_quant_config.json in {tmp_path} says how it is quantised; download them."
    )
    assert_sentence(tmp_path, lambda: read_all(tmp_path, None, int4_parts()), CheckpointError, message)


def test_a_tensor_that_two_groups_name_is_refused(tmp_path):
    config = json.loads(json.dumps(INT4))
    config["config_groups"]["group_1"] = config["config_groups"]["group_0"]
    message = (
        "{file}: tensor '{name}.weight_packed' is quantised, but 2 groups of 'config_groups' in {config} name it"
        " instead of one."
    )
    assert_sentence(tmp_path, lambda: read_all(tmp_path, config, int4_parts()), CheckpointError, message)


def test_another_producer_is_refused_by_name(tmp_path):
    (tmp_path / "hf_quant_config.json").write_text('{"producer": {"name": "other"}, "quantization": {}}')
    path = tmp_path / "hf_quant_config.json"
    message = f"{path}: the producer 'other' is not known (known: modelopt); convert the BF16 original."
    assert_sentence(tmp_path, lambda: read_all(tmp_path, None, {}), UnsupportedCheckpointError, message)


# --- anything at all

WORDS = st.sampled_from([
    "compressed-tensors", "fp8", "modelopt", "NVFP4", "FP8", "MIXED_PRECISION", "pack-quantized", "int-quantized",
    "float-quantized", "naive-quantized", "nvfp4-pack-quantized", "int", "float", "group", "channel", "tensor", "block",
    "tensor_group", "Linear", "re:.*", "re:(", MODULE, "mixed-precision", "dense",
])  # fmt: skip
KEYS = st.sampled_from([
    "quant_method", "quant_algo", "format", "config_groups", "ignore", "targets", "weights", "num_bits", "type",
    "strategy", "group_size", "block_structure", "symmetric", "dynamic", "actorder", "weight_block_size", "group_0",
    "quantized_layers", "transform_config", "sparsity_config", MODULE,
])  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(-1, 64) | st.floats() | st.text(max_size=8) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS | st.text(max_size=8), inner, max_size=5),
    max_leaves=12,
)
PARTS = [int4_parts(), zero_points(), fp8_parts(), nvfp4_parts(), modelopt_parts()]
CONFIGS = [INT4, ASYMMETRIC, REORDERED, NVFP4, FP8, MODELOPT]


def assert_values_or_one_sentence(folder: Path, quantization: object, parts: Tensors) -> None:
    try:
        read_all(folder, quantization, parts)
    except Dflash2Error as error:
        assert str(error).endswith(".")
        assert "\n" not in str(error)


FOLDER = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@FOLDER
@given(quantization=VALUES, parts=st.sampled_from(PARTS))
def test_any_json_as_configuration_gives_values_or_one_sentence(tmp_path, quantization, parts):
    assert_values_or_one_sentence(tmp_path, quantization, parts)


@FOLDER
@given(config=st.sampled_from(CONFIGS), data=st.data(), parts=st.sampled_from(PARTS))
def test_any_change_to_a_configuration_gives_values_or_one_sentence(tmp_path, config, data, parts):
    changed = json.loads(json.dumps(config))
    level = changed
    group = changed.get("config_groups", {}).get("group_0")
    if group is not None:
        level = data.draw(st.sampled_from([changed, group, group["weights"]]))
    level[data.draw(KEYS)] = data.draw(VALUES)
    assert_values_or_one_sentence(tmp_path, changed, parts)


DTYPES = {"F32": np.float32, "F16": np.float16, "I32": np.int32, "I64": np.int64, "U8": np.uint8, "I8": np.int8}
STORED = {**DTYPES, "BF16": np.uint16, "F8_E4M3": np.uint8, "F8_E8M0": np.uint8, "F8_E5M2": np.uint8}


@FOLDER
@given(config=st.sampled_from(CONFIGS), data=st.data(), parts=st.sampled_from(PARTS))
def test_any_change_to_a_tensor_gives_values_or_one_sentence(tmp_path, config, data, parts):
    name = data.draw(st.sampled_from([*parts, "weight_g_idx", "weight_zero_point"]))
    dtype = data.draw(st.sampled_from(sorted(STORED)))
    shape = data.draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 6, 16, 40]), max_size=3))
    n_bytes = int(np.prod(shape, dtype=int)) * np.dtype(STORED[dtype]).itemsize
    content = np.frombuffer(data.draw(st.binary(min_size=16, max_size=16)) * (n_bytes // 16 + 1), np.uint8)
    values = content[:n_bytes].copy().view(STORED[dtype]).reshape(shape)
    with np.errstate(all="ignore"):
        assert_values_or_one_sentence(tmp_path, config, parts | {name: (dtype, values)})
