"""The options that settle what a checkpoint leaves open, each named by the refusal that asks for it."""

import pytest
from click.testing import CliRunner
from factories import drafter_config, drafter_tensors, make_target, write_checkpoint
from factories_dialects import speculators_config

from dflash2.commands.convert import convert
from dflash2.errors import CheckpointError
from dflash2.gguf_info import read_gguf_info

CASES = {
    "--block-size": (drafter_config(1, without=["block_size"]), "7", "dflash.block_size", 7),
    "--mask-token-id": (drafter_config(1, without=["mask_token_id"]), "3", "tokenizer.ggml.mask_token_id", 3),
    "--rope-theta": (
        drafter_config(1, dflash_config={"backbone_rotary_base": 5e6}),
        "5e6",
        "dflash.rope.freq_base",
        5e6,
    ),
    "--tap-ids": (speculators_config(1, speculators_version=None), "inputs", "dflash.target_layers", (1, 3, 4)),
}


@pytest.mark.parametrize("option", CASES)
def test_an_option_settles_what_the_refusal_asks_for(tmp_path, option):
    config, value, key, expected = CASES[option]
    folder = write_checkpoint(tmp_path / "drafter", config, drafter_tensors(drafter_config(1)))
    target, output = make_target(tmp_path / "target.gguf"), tmp_path / "out.gguf"
    arguments = [str(folder), "--target", str(target), "-o", str(output)]
    refused = CliRunner().invoke(convert, arguments)
    assert isinstance(refused.exception, CheckpointError)
    assert option in str(refused.exception)
    assert not output.exists()
    done = CliRunner().invoke(convert, [*arguments, option, value], catch_exceptions=False)
    assert done.exit_code == 0
    assert read_gguf_info(output).metadata[key] == expected
