"""Numbers that 32 bits do not hold, options that nothing can mean, and configs that say a thing twice."""

import json
import re

import pytest
from click.testing import CliRunner
from factories import drafter_config, drafter_tensors, make_drafter, make_target, write_checkpoint
from factories_check import edited_gguf
from gguf.constants import GGUFValueType

from dflash2.commands.convert import convert as command
from dflash2.converter import Overrides, check, convert
from dflash2.converter.graph_size import largest_kernel
from dflash2.errors import CheckpointError, OptionError, UnsupportedCheckpointError

U32 = GGUFValueType.UINT32

OPTIONS = [
    *(("block_size", value) for value in (0, 1, 1025, True, 4.0, "4")),
    *(("mask_token_id", value) for value in (-5, 2**31, True)),
    *(("rope_theta", value) for value in (float("nan"), float("inf"), 1e39, 1e-50, 0, -1.0, "5", True, 10**400)),
    ("tap_ids", "foo"),
    ("tap_ids", ["inputs"]),
    ("d2t", "foo"),
    ("sliding_window", "on"),
]


@pytest.mark.parametrize(("name", "value"), OPTIONS)
def test_an_option_that_nothing_can_mean_is_refused_by_name(name, value):
    with pytest.raises(OptionError, match=f"^The option '{name}' is .*; give .*\\.$"):
        Overrides(**{name: value})


@pytest.fixture
def target(tmp_path):
    return make_target(tmp_path / "target.gguf")


@pytest.mark.parametrize("value", ["nan", "inf", "1e39", "1e-50"])
def test_a_base_that_32_bits_do_not_hold_is_refused_on_the_command_line(tmp_path, target, value):
    config = drafter_config()
    folder = write_checkpoint(tmp_path / "drafter", config, drafter_tensors(config))
    arguments = [str(folder), "--target", str(target), "-o", str(tmp_path / "out.gguf"), "--rope-theta", value]
    refused = CliRunner().invoke(command, arguments)
    assert isinstance(refused.exception, OptionError)
    assert not (tmp_path / "out.gguf").exists()


NUMBERS = {
    "rope_theta": {"rope_theta": 1e-46},
    "rms_norm_eps": {"rms_norm_eps": 1e-40},
    "output_multiplier": {"dflash_config": {"output_multiplier": 1e-46}},
    "final_logit_softcapping": {"dflash_config": {"final_logit_softcapping": 1e39}},
    "rope_scaling.factor": {"rope_scaling": {"rope_type": "linear", "factor": 1e-39}},
}


@pytest.mark.parametrize("key", NUMBERS)
def test_a_number_that_32_bits_do_not_hold_is_refused_by_its_key(tmp_path, target, key):
    config = drafter_config(**NUMBERS[key])
    folder = write_checkpoint(tmp_path / "drafter", config, drafter_tensors(config))
    with pytest.raises(CheckpointError, match=f"'{re.escape(key)}' is .*, not a finite number that 32 bits hold"):
        convert(folder, target, tmp_path / "out.gguf")


def test_a_computed_factor_that_32_bits_do_not_hold_is_refused(tmp_path, target):
    scaling = {"rope_type": "yarn", "factor": 1e38, "attention_factor": 2e-38}
    config = drafter_config(rope_scaling=scaling)
    folder = write_checkpoint(tmp_path / "drafter", config, drafter_tensors(config))
    with pytest.raises(CheckpointError, match=r"'dflash\.rope\.scaling\.attn_factor' is .*, which 32 bits do not hold"):
        convert(folder, target, tmp_path / "out.gguf")


@pytest.mark.parametrize("size", [1, 1025, 2**31 - 1])
def test_a_block_size_beyond_the_flags_range_is_refused(tmp_path, target, size):
    config = drafter_config(block_size=size, dflash_config={"block_size": size})
    folder = write_checkpoint(tmp_path / "drafter", config, drafter_tensors(config))
    with pytest.raises(CheckpointError, match=f"'block_size' is {size}, not an integer from 2 to 1024"):
        convert(folder, target, tmp_path / "out.gguf")


def test_a_name_twice_in_config_json_is_refused(tmp_path, target):
    config = drafter_config()
    folder = write_checkpoint(tmp_path / "drafter", config, drafter_tensors(config))
    text = json.dumps(config)
    (folder / "config.json").write_text(text[:-1] + ', "rope_theta": 5.0}')
    with pytest.raises(CheckpointError, match=r"is not valid JSON \(the name 'rope_theta' appears twice\)"):
        convert(folder, target, tmp_path / "out.gguf")


@pytest.mark.parametrize(("layers", "longest"), [(1, 27), (2, 12), (3, 7), (5, 3), (8, 3)])
def test_the_longest_kernel_is_what_the_librarys_graph_holds(layers, longest):
    """Measured: with these the pinned llama.cpp loads a drafter, with one more it aborts."""
    assert largest_kernel(layers) == longest


def test_a_kernel_that_the_graph_does_not_hold_is_refused_and_found(tmp_path, target):
    config = drafter_config(dflash_config={"conv_kernel_size": 13})
    folder = write_checkpoint(tmp_path / "drafter", config, drafter_tensors(config))
    with pytest.raises(
        UnsupportedCheckpointError, match=r"'conv_kernel_size' is 13, but llama\.cpp's graph of 2 layers"
    ):
        convert(folder, target, tmp_path / "out.gguf")
    good = convert(make_drafter(tmp_path / "good"), target, tmp_path / "good.gguf").output
    long = edited_gguf(good, tmp_path / "long.gguf", set_keys={"dflash.conv_kernel_size": (13, U32, None)})
    found = {finding.key: finding for finding in check(long, target).findings if finding.level == "error"}
    assert (found["conv_kernel"].expected, found["conv_kernel"].found) == ("1 to 12 for 2 layers", 13)


def test_a_block_size_that_exhausts_memory_is_found(tmp_path, target):
    good = convert(make_drafter(tmp_path / "good"), target, tmp_path / "good.gguf").output
    huge = edited_gguf(good, tmp_path / "huge.gguf", set_keys={"dflash.block_size": (2**31 - 1, U32, None)})
    found = {finding.key: finding for finding in check(huge, target).findings if finding.level == "error"}
    assert found["block_size"].expected == "2 to 1024"
