"""Numbers that 32 bits do not hold, options that nothing can mean, and configs that say a thing twice."""

import json
import re

import pytest
from click.testing import CliRunner
from factories import drafter_config, drafter_tensors, make_target, write_checkpoint

from dflash2.commands.convert import convert as command
from dflash2.converter import Overrides, check, convert
from dflash2.errors import CheckpointError, OptionError

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
