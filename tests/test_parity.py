"""`dflash2 parity`: the demo pair has none of the faults that are put into copies of it, each at a known stage."""

import json
import subprocess
import sys

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from gguf_edit import edit_gguf, values_of

from dflash2.converter import convert
from dflash2.evidence import parity, scaled_target
from dflash2.native import ContextOptions, Tokenizer

pytest.importorskip("torch")

F32, F16 = 0, 1
FLASH_OFF = 0


def options(cache=F32):
    return ContextOptions(
        n_ctx=512,
        n_batch=64,
        n_ubatch=64,
        n_threads=1,
        n_threads_batch=1,
        flash_attn_type=FLASH_OFF,
        type_k=cache,
        type_v=cache,
    )


@pytest.fixture(scope="module")
def tokens(target_path, prompts):
    tokenizer = Tokenizer(target_path)
    ids = tokenizer.tokenize(prompts[0]).tolist()
    tokenizer.close()
    return [ids]


@pytest.fixture(scope="module")
def converted(demo, tmp_path_factory):
    """The v2 drafter in any output type."""
    folder = tmp_path_factory.mktemp("outtypes")

    def make(outtype):
        path = folder / f"{outtype}.gguf"
        if not path.exists():
            convert(demo.drafter, demo.target, path, outtype=outtype)
        return path

    return make


def names(outcome):
    return [str(stage) for stage in outcome.stages]


def test_the_demo_drafter_computes_what_the_reference_does(target_path, drafter_gguf, tokens):
    target = scaled_target(target_path, parameters=0, weights="f32")
    outcome = parity(target, drafter_gguf, tokens, checkpoint=drafter_gguf, options=options())
    assert outcome.first is None
    assert outcome.n_equal == outcome.n_blocks == 4
    assert all(stage.error < 1e-5 for stage in outcome.stages)
    assert [stage.weights for stage in outcome.stages if stage.weights is not None] == [0.0] * 31
    in_a_layer = [f"{part}, layer 1" for part in ("injected keys", "attention conv in", "attention", "ffn conv out")]
    assert [name for name in names(outcome) if name in in_a_layer] == in_a_layer
    assert names(outcome)[0] == "fused features"
    assert names(outcome)[-4:] == ["logits", "candidates", "pair scores", "proposals"]


def test_a_drafter_without_selector_has_no_stages_of_one(target_path, drafter_v1_gguf, tokens):
    outcome = parity(target_path, drafter_v1_gguf, tokens, options=options())
    assert outcome.first is None
    assert not {"candidates", "pair scores", "ffn conv in, layer 0"} & set(names(outcome))
    assert names(outcome)[-2:] == ["logits", "proposals"]


@pytest.mark.parametrize("outtype", ["f16", "bf16", "q8_0"])
def test_rounded_weights_explain_their_own_errors(target_path, converted, drafter_gguf, tokens, outtype):
    outcome = parity(target_path, converted(outtype), tokens, checkpoint=drafter_gguf, options=options(F16))
    assert outcome.first is None
    fused = outcome.stages[0]
    assert fused.error > 1e-5  # more than single precision would explain
    assert outcome.n_equal >= outcome.n_blocks - 1


def test_a_causality_that_stock_ignores_is_the_attention_of_layer_0(target_path, drafter_gguf, tokens, tmp_path):
    """The engine's fault: stock llama.cpp does not know the key for sliding layers."""
    wrong = edit_gguf(drafter_gguf, tmp_path / "causal.gguf", metadata={"dflash.attention.causal_swa": True})
    outcome = parity(target_path, wrong, tokens, options=options())
    assert str(outcome.first) == "attention, layer 0"
    assert outcome.first.engine_drifts
    drifting = [str(stage) for stage in outcome.stages if stage.drifts]
    assert drifting == ["attention, layer 0", "attention, layer 1"]  # the stages between are fed the engine's own
    assert outcome.n_equal < outcome.n_blocks


def swapped_taps(path):
    name = "blk.1.ffn_conv_base"
    return {name: (values_of(path, name)[:, ::-1].copy(), GGMLQuantizationType.F32)}


def shifted_codebook(path):
    name = "selector_successor.weight"
    return {name: (np.roll(values_of(path, name), 1, axis=0), GGMLQuantizationType.F32)}


FAULTS = {
    "taps in the wrong order": ({}, swapped_taps, "ffn conv in, layer 1"),
    "rope theta": ({"dflash.rope.freq_base": 20000.0}, lambda _: {}, "injected keys, layer 0"),
    "eps": ({"dflash.attention.layer_norm_rms_epsilon": 1e-2}, lambda _: {}, "fused features"),
    "window": ({"dflash.attention.sliding_window": 32}, lambda _: {}, "attention, layer 0"),
    "codebook one row off": ({}, shifted_codebook, "pair scores"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_file_unlike_its_checkpoint_is_named_by_its_first_stage(target_path, drafter_gguf, tokens, tmp_path, fault):
    metadata, tensors, stage = FAULTS[fault]
    wrong = edit_gguf(drafter_gguf, tmp_path / "wrong.gguf", metadata=metadata, tensors=tensors(drafter_gguf))
    outcome = parity(target_path, wrong, tokens, checkpoint=drafter_gguf, n_blocks=2, options=options())
    assert str(outcome.first) == stage
    assert outcome.first.weights_drift
    assert not any(stage.engine_drifts for stage in outcome.stages)


def run(*arguments):
    command = [sys.executable, "-m", "dflash2.cli", "parity", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env={**__import__("os").environ, "COLUMNS": "200"})
