"""`check` finds what keeps a pair from working, from headers alone, and says what to do."""

import json

import numpy as np
import pytest
from factories import drafter_config, drafter_tensors, make_drafter, make_target, write_checkpoint
from factories_check import edited_gguf, make_fork, with_key
from gguf import GGUFWriter
from gguf.constants import GGUFValueType
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash2 import native
from dflash2.converter import Overrides, check, convert, inspect, upgrade
from dflash2.errors import GGUFError, NativeError

U32, I32, STRING = GGUFValueType.UINT32, GGUFValueType.INT32, GGUFValueType.STRING
BOOL, ARRAY = GGUFValueType.BOOL, GGUFValueType.ARRAY


@pytest.fixture
def target(tmp_path):
    return make_target(tmp_path / "target.gguf")


@pytest.fixture
def converted(tmp_path, target):
    return convert(make_drafter(tmp_path / "drafter"), target, tmp_path / "converted.gguf", outtype="f32").output


def findings(report):
    return {finding.key: finding for finding in report.findings}


def only_problem(report):
    assert len(report.problems) == 1, report.problems
    return report.problems[0]


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("as_folder", [True, False])
def test_a_good_pair_passes_every_check(tmp_path, target, version, as_folder):
    drafter = make_drafter(tmp_path / "drafter", version)
    if not as_folder:
        drafter = convert(drafter, target, tmp_path / "out.gguf").output
    report = check(drafter, target)
    assert report.problems == ()
    assert report.passes(strict=True)
    found = findings(report)
    assert found["tap_range"].found == [1, 3, 4]
    assert found["library_drafter"].expected == ("DFlash 2" if version == 2 else "DFlash")
    assert found["library_target"].found == "qwen3"


def test_every_finding_is_json_with_all_fields(converted, target):
    result = check(converted, target).to_dict()
    assert result["schema"] == "dflash2.check/1"
    assert (result["passes"], result["errors"], result["warnings"]) == (True, 0, 0)
    for finding in result["findings"]:
        assert set(finding) == {"level", "key", "expected", "found", "fix"}
    assert len({finding["key"] for finding in result["findings"]}) == len(result["findings"])


def test_sizes_of_another_target(tmp_path, converted):
    report = check(converted, make_target(tmp_path / "other.gguf", hidden=128, layers=3, vocab=280))
    found = findings(report)
    assert (found["hidden_size"].level, found["hidden_size"].expected, found["hidden_size"].found) == ("error", 64, 128)
    assert (found["tap_range"].level, found["tap_range"].expected) == ("error", "1 to 3")
    assert (found["vocab_size"].level, found["vocab_size"].expected, found["vocab_size"].found) == ("error", 280, 288)
    assert not report.passes()


@pytest.mark.parametrize(("architecture", "level"), [("qwen3", "error"), ("mimo2", "ok")])
def test_a_tap_at_the_last_layers_output_needs_an_architecture_that_publishes_it(tmp_path, architecture, level):
    target = make_target(tmp_path / "target.gguf", architecture=architecture)
    drafter = make_drafter(tmp_path / "drafter", dflash_config={"target_layer_ids": [0, 2, 4]})
    assert findings(check(drafter, target))["tap_range"].level == level


def test_a_target_that_publishes_no_layer_inputs_is_an_error(tmp_path, converted):
    report = check(converted, make_target(tmp_path / "t.gguf", architecture="glm5-next"))
    assert only_problem(report).key == "tappable"
    assert "another engine" in only_problem(report).fix


def test_an_architecture_the_library_does_not_know_is_an_error(tmp_path, converted):
    found = findings(check(converted, make_target(tmp_path / "t.gguf", architecture="qwen99")))
    assert (found["library_target"].level, found["library_target"].expected) == ("error", "qwen99")


def test_the_library_at_hand_does_not_count_for_another_program(converted, tmp_path):
    target = make_target(tmp_path / "t.gguf", architecture="qwen99")
    assert findings(check(converted, target))["library_target"].level == "error"
    assert not [key for key in findings(check(converted, target, library=False)) if key.startswith("library")]


def test_llama3_factors_are_lost_on_an_mrope_target(tmp_path):
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    target = make_target(tmp_path / "m.gguf", architecture="qwen35", mrope=True)
    drafter = make_drafter(tmp_path / "drafter", rope_scaling=scaling)
    assert only_problem(check(drafter, target)).key == "rope_factors"


def test_sections_on_a_target_without_mrope_are_a_warning(tmp_path, converted, target):
    key = with_key("dflash.rope.dimension_sections", [8, 0, 0, 0], ARRAY, GGUFValueType.INT32)
    report = check(edited_gguf(converted, tmp_path / "s.gguf", set_keys=key), target)
    assert (only_problem(report).level, only_problem(report).key) == ("warning", "rope_sections")
    assert report.passes()
    assert not report.passes(strict=True)


@pytest.mark.parametrize(
    ("edit", "key", "expected", "found"),
    [
        ({"without": ("dflash.block_size",)}, "block_size", "2 to 1024", None),
        ({"without": ("tokenizer.ggml.mask_token_id",)}, "mask_token", "a token id", None),
        ({"set_keys": with_key("tokenizer.ggml.mask_token_id", 288, U32)}, "mask_range", "below 288", 288),
        ({"without": ("dflash.target_layers",), "drop_tensors": ("fc.weight",)}, "taps", "a list of layer ids", []),
        ({"without": ("dflash.feed_forward_length",)}, "keys", ["dflash.feed_forward_length"], None),
        ({"set_keys": with_key("dflash.block_count", 2**32 - 1, U32)}, "keys", ["dflash.block_count"], None),
        (
            {"without": ("dflash.attention.layer_norm_rms_epsilon",)},
            "keys",
            ["dflash.attention.layer_norm_rms_epsilon"],
            None,
        ),
        (
            {"set_keys": with_key("dflash.attention.sliding_window_pattern", [True], ARRAY, BOOL)},
            "sliding_window",
            2,
            1,
        ),
        ({"without": ("dflash.attention.sliding_window_pattern",)}, "sliding_window", "a pattern of 2 layers", None),
        (
            {"set_keys": with_key("dflash.rope.scaling.type", "dynamic", STRING)},
            "rope_scaling",
            ["none", "linear", "yarn", "longrope"],
            "dynamic",
        ),
        ({"drop_tensors": ("blk.1.ffn_down.weight",)}, "tensors", ["blk.1.ffn_down.weight"], None),
        (
            {"tensor_values": {"blk.0.attn_q.bias": np.zeros(64, np.float32)}},
            "tensors",
            None,
            ["blk.0.attn_q.bias"],
        ),
        (
            {"tensor_values": {"output_norm.weight": np.ones(32, np.float32)}},
            "shapes",
            "output_norm.weight [64]",
            [32],
        ),
        (
            {"tensor_values": {"blk.0.attn_conv_base": np.ones((2, 2, 64), np.float16)}},
            "tensor_types",
            "F32",
            ["blk.0.attn_conv_base F16"],
        ),
        ({"set_keys": with_key("dflash.selector_top_k", 8, U32)}, "selector_lattice", 72, 64),
        (
            {"set_keys": with_key("dflash.target_layers", [1, 3, 4], ARRAY, GGUFValueType.INT64)},
            "taps",
            "INT32",
            "INT64",
        ),
        (
            {"set_keys": with_key("dflash.rope.dimension_sections", [8, 0], ARRAY, GGUFValueType.INT32)},
            "rope_scaling",
            "4 sections",
            [8, 0],
        ),
        (
            {"tensor_values": {"blk.0.ffn_gate.weight": np.ones((96, 64), np.int8)}},
            "tensor_types",
            "a type for weights",
            ["blk.0.ffn_gate.weight I8"],
        ),
        ({"set_keys": with_key("dflash.conv_group_size", 48, U32)}, "conv_group", "a divisor of 64", 48),
    ],
)
def test_a_file_that_cannot_work_is_named(tmp_path, converted, target, edit, key, expected, found):
    report = check(edited_gguf(converted, tmp_path / "edited.gguf", **edit), target)
    finding = findings(report)[key]
    assert (finding.level, finding.expected, finding.found) == ("error", expected, found)
    assert finding.fix
    assert not report.passes()


@pytest.mark.parametrize(
    "edit", [{"without": ("dflash.selector_top_k",)}, {"drop_tensors": ("selector_hidden.weight",)}]
)
def test_half_a_selector_is_an_error(tmp_path, converted, target, edit):
    finding = findings(check(edited_gguf(converted, tmp_path / "half.gguf", **edit), target))["selector"]
    assert finding.level == "error"
    assert len(finding.found) == 1


def test_a_scaling_factor_without_its_type_is_a_warning(tmp_path, converted, target):
    key = with_key("dflash.rope.scaling.factor", 64.0, GGUFValueType.FLOAT32)
    finding = only_problem(check(edited_gguf(converted, tmp_path / "e.gguf", set_keys=key), target))
    assert (finding.level, finding.key) == ("warning", "rope_scaling")
    assert "takes the factor 64 as linear" in finding.fix


def test_mixed_causality_is_a_warning_for_stock_libraries(tmp_path, target):
    mixed = make_drafter(
        tmp_path / "mixed", 1, layer_types=["sliding_attention", "full_attention"], without=["is_causal"]
    )
    for drafter in (mixed, convert(mixed, target, tmp_path / "mixed.gguf").output):
        finding = only_problem(check(drafter, target))
        assert (finding.level, finding.key, finding.found) == (
            "warning",
            "causality",
            "sliding layers causal, full layers not",
        )
        assert "patched" in finding.fix


def test_a_mixed_file_that_says_nothing_of_sliding_layers_is_a_warning(tmp_path, target):
    drafter = make_drafter(tmp_path / "mixed", 1, layer_types=["sliding_attention", "full_attention"])
    silent = convert(drafter, target, tmp_path / "silent.gguf").output
    finding = only_problem(check(silent, target))
    assert (finding.key, finding.expected, finding.found) == ("causality", "dflash.attention.causal_swa", None)


def test_embeddings_without_a_head_are_a_warning(tmp_path, converted, target):
    edited = edited_gguf(
        converted, tmp_path / "e.gguf", tensor_values={"token_embd.weight": np.ones((288, 64), np.float32)}
    )
    finding = only_problem(check(edited, target))
    assert (finding.level, finding.key, finding.found) == ("warning", "embeddings", ["token_embd.weight"])


@pytest.mark.parametrize(
    ("ids", "level", "expected", "found"),
    [
        (np.array([5, 1, 9], np.int64), "ok", 3, 3),
        (np.array([5, 1, 288], np.int64), "error", "ids below 288", 288),
        (np.array([5, -1, 9], np.int64), "error", "ids below 288", -1),
        (np.array([5, 1, 5], np.int64), "error", "each id once", "1 repeated"),
        (np.array([5, 1, 9], np.int32), "error", "I64", "I32"),
    ],
)
def test_a_trimmed_head_maps_to_token_ids_of_the_target(tmp_path, converted, target, ids, level, expected, found):
    edited = edited_gguf(
        converted,
        tmp_path / "e.gguf",
        tensor_values={"d2t": ids, "output.weight": np.ones((3, 64), np.float32)},
    )
    finding = findings(check(edited, target))["d2t"]
    assert (finding.level, finding.expected, finding.found) == (level, expected, found)


def test_a_map_without_its_head_is_an_error(tmp_path, converted, target):
    edited = edited_gguf(converted, tmp_path / "e.gguf", tensor_values={"d2t": np.array([1], np.int64)})
    finding = findings(check(edited, target))["d2t"]
    assert (finding.level, finding.expected, finding.found) == ("error", "output.weight", None)


def test_a_checkpoint_that_cannot_be_converted_says_why(tmp_path, target):
    drafter = make_drafter(tmp_path / "drafter", without=["block_size"])
    finding = only_problem(check(drafter, target))
    assert (finding.level, finding.key) == ("error", "checkpoint")
    assert "'block_size' is missing" in finding.found
    assert check(drafter, target, overrides=Overrides(block_size=4)).passes(strict=True)


def test_a_checkpoint_that_lacks_a_tensor_says_which(tmp_path, target):
    config = drafter_config()
    tensors = drafter_tensors(config)
    del tensors["norm.weight"]
    finding = only_problem(check(write_checkpoint(tmp_path / "drafter", config, tensors), target))
    assert "lacks the tensor 'norm.weight'" in finding.found


def test_num_target_layers_that_differ_are_a_warning(tmp_path, target):
    finding = only_problem(check(make_drafter(tmp_path / "drafter", num_target_layers=36), target))
    assert (finding.level, finding.key, finding.expected, finding.found) == ("warning", "target_layers", 36, 5)


def test_files_in_the_wrong_order_or_of_the_wrong_kind_are_errors(converted, target):
    with pytest.raises(GGUFError, match="is a drafter itself"):
        check(target, converted)
    with pytest.raises(GGUFError, match="is a qwen3 model, no DFlash drafter; give the drafter first"):
        check(target, target)


def test_one_part_of_a_split_drafter_is_refused(tmp_path, converted, target):
    part = edited_gguf(converted, tmp_path / "part.gguf", set_keys=with_key("split.count", 2, GGUFValueType.UINT16))
    with pytest.raises(GGUFError, match="one part of a split GGUF; join the parts"):
        check(part, target)


DRAFTER_KEYS = (
    "block_count",
    "embedding_length",
    "attention.head_count",
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "block_size",
    "target_layers",
    "target_layer_ids",
    "rope.dimension_sections",
    "rope.scaling.type",
    "selector_top_k",
    "conv_group_size",
    "selector_rank",
)
VALUES = st.one_of(
    st.tuples(st.integers(0, 2**32 - 1), st.just(U32), st.none()),
    st.tuples(st.text(max_size=4), st.just(STRING), st.none()),
    st.tuples(st.booleans(), st.just(BOOL), st.none()),
    st.tuples(st.floats(width=32), st.just(GGUFValueType.FLOAT32), st.none()),
    st.tuples(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=5), st.just(ARRAY), st.just(I32)),
    st.tuples(st.lists(st.text(max_size=3), min_size=1, max_size=3), st.just(ARRAY), st.just(STRING)),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    edits=st.dictionaries(st.sampled_from(DRAFTER_KEYS), VALUES, min_size=1, max_size=3),
    architecture=st.sampled_from(["dflash", "dflash-draft"]),
)
def test_whatever_the_keys_hold_is_a_finding_or_one_sentence(tmp_path, converted, target, edits, architecture):
    keys = {f"{architecture}.{name}": value for name, value in edits.items()}
    edited = edited_gguf(
        converted,
        tmp_path / "fuzz.gguf",
        architecture=architecture,
        rename_key=lambda key: key.replace("dflash.", f"{architecture}.", 1) if key.startswith("dflash.") else key,
        without=tuple(f"dflash.{name}" for name in edits),
        set_keys=keys,
    )
    for answer in (
        lambda: check(edited, target).to_dict(),
        lambda: inspect(edited).rows(),
        lambda: [change.what for change in upgrade(edited, tmp_path / "new.gguf").changes],
    ):
        try:
            json.dumps(answer())
        except GGUFError as error:
            assert str(edited) in str(error)


def test_a_fork_is_checked_as_what_upgrade_would_make_of_it(tmp_path, converted, target):
    finding = only_problem(check(make_fork(converted, tmp_path / "fork.gguf"), target))
    assert (finding.key, finding.found) == ("architecture", "dflash-draft (a fork's spelling)")
    assert "run dflash2 upgrade" in finding.fix


def test_the_tables_of_tensors_agree_with_the_library(tmp_path, converted, target):
    """What `check` passes loads, and what it refuses for its tensors does not."""
    placement = native.Placement()
    native.silence()
    native.Model(converted, placement)
    for name, edit in {
        "missing": {"drop_tensors": ("blk.1.attn_q_norm.weight",)},
        "unknown": {"tensor_values": {"blk.0.attn_q.bias": np.zeros(64, np.float32)}},
        "shape": {"tensor_values": {"output_norm.weight": np.ones(32, np.float32)}},
    }.items():
        edited = edited_gguf(converted, tmp_path / f"{name}.gguf", **edit)
        assert not check(edited, target).passes()
        with pytest.raises(NativeError):
            native.Model(edited, placement)


def test_a_vocabulary_of_248k_tokens_is_compared_entry_by_entry(tmp_path):
    tokens = [f"token {i}" for i in range(248_320)]
    for name, architecture in (("target", "qwen3"), ("drafter", "dflash")):
        writer = GGUFWriter(tmp_path / f"{name}.gguf", architecture)
        writer.add_block_count(5)
        writer.add_embedding_length(64)
        writer.add_token_list(tokens)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        tokens = [*tokens[:-1], "<mask>"]
    found = findings(check(tmp_path / "drafter.gguf", tmp_path / "target.gguf"))
    assert (found["tokens"].level, found["tokens"].expected) == ("warning", "id 248319 is 'token 248319'")
    assert found["tokens"].found == "id 248319 is '<mask>'; 1 of 248320 ids differ"
