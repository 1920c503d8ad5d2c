"""`dflash2 parity`: the demo pair has none of the faults that are put into copies of it, each at a known stage."""

import os
import subprocess
import sys

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from gguf_edit import edit_gguf, values_of

from dflash2.converter import convert
from dflash2.errors import EvidenceError
from dflash2.evidence import parity, read_result, scaled_target
from dflash2.native import ContextOptions, Tokenizer, library

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
    ids = tokenizer.tokenize("".join(prompts[:3])).tolist()
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
    assert [stage.weights for stage in outcome.stages if stage.weights is not None] == [0.0] * (
        23 if library().patched else 31
    )
    in_a_layer = [f"{part}, layer 1" for part in ("injected keys", "queries", "attention", "ffn", "layer output")]
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
    outcome = parity(target_path, converted(outtype), tokens, checkpoint=drafter_gguf, n_blocks=2, options=options(F16))
    assert outcome.first is None
    fused = outcome.stages[0]
    assert fused.error > 1e-5  # more than single precision would explain
    assert outcome.n_equal >= outcome.n_blocks - 1


def test_a_causality_that_stock_ignores_is_the_attention_of_layer_0(target_path, drafter_gguf, tokens, tmp_path):
    """The engine's fault: stock llama.cpp does not know the key for sliding layers."""
    mixed = edit_gguf(drafter_gguf, tmp_path / "causal.gguf", metadata={"dflash.attention.causal_swa": True})
    outcome = parity(target_path, mixed, tokens, options=options())
    if library().patched:
        assert outcome.first is None
        return
    assert str(outcome.first) == "attention, layer 0"
    assert outcome.first.engine_drifts
    drifting = [str(stage) for stage in outcome.stages if stage.drifts]
    assert drifting == ["attention, layer 0", "attention, layer 1"]  # the stages between are fed the engine's own
    assert outcome.n_equal < outcome.n_blocks


def first_ffn_conv():
    """Which stage answers for that of layer 1: a patched library fuses it with what follows."""
    return "ffn, layer 1" if library().patched else "ffn conv in, layer 1"


def swapped_taps(path):
    name = "blk.1.ffn_conv_base"
    return {name: (values_of(path, name)[:, ::-1].copy(), GGMLQuantizationType.F32)}


def shifted_codebook(path):
    name = "selector_successor.weight"
    return {name: (np.roll(values_of(path, name), 1, axis=0), GGMLQuantizationType.F32)}


FAULTS = {
    "taps in the wrong order": ({}, swapped_taps, None),
    "rope theta": ({"dflash.rope.freq_base": 20000.0}, lambda _: {}, "injected keys, layer 0"),
    "eps": ({"dflash.attention.layer_norm_rms_epsilon": 1e-2}, lambda _: {}, "injected keys, layer 0"),
    "window": ({"dflash.attention.sliding_window": 32}, lambda _: {}, "attention, layer 0"),
    "codebook one row off": ({}, shifted_codebook, "pair scores"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_file_unlike_its_checkpoint_is_named_by_its_first_stage(target_path, drafter_gguf, tokens, tmp_path, fault):
    metadata, tensors, stage = FAULTS[fault]
    wrong = edit_gguf(drafter_gguf, tmp_path / "wrong.gguf", metadata=metadata, tensors=tensors(drafter_gguf))
    outcome = parity(target_path, wrong, tokens, checkpoint=drafter_gguf, n_blocks=2, options=options())
    assert str(outcome.first) == (stage or first_ffn_conv())
    assert outcome.first.weights_drift
    assert not any(stage.engine_drifts for stage in outcome.stages)


def run(*arguments):
    command = [sys.executable, "-c", "from dflash2.cli import main; main()", "parity", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "COLUMNS": "160"}, check=False)


def test_the_command_names_the_stage_and_ends_with_status_1(target_path, demo, drafter_gguf, tmp_path):
    wrong = edit_gguf(drafter_gguf, tmp_path / "wrong.gguf", tensors=swapped_taps(drafter_gguf))
    output = tmp_path / "parity.json"
    prompts = "--category", "code", "--blocks", "2"
    done = run(target_path, wrong, "--checkpoint", demo.drafter, "--json", output, *prompts)
    assert done.returncode == 1, done.stderr
    assert f"The first stage that drifts: {first_ffn_conv()}. The file says something else" in done.stdout
    found = read_result(output, "parity")
    assert found.summary == {"passed": False, "first": first_ffn_conv(), "blocks": 2, "equal_proposals": 2}
    assert next(row["name"] for row in found.rows if row["drifts"]) == first_ffn_conv().split(",")[0]
    done = run(target_path, drafter_gguf, *prompts)
    assert done.returncode == 0, done.stderr
    assert "No stage drifts." in done.stdout


def test_without_pytorch_one_sentence_says_so(target_path, drafter_gguf, tokens, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(EvidenceError, match=r"needs PyTorch: pip install 'llama-dflash2\[reference\]'"):
        parity(target_path, drafter_gguf, tokens, options=options())


def test_what_the_reference_does_not_compute_is_refused_by_name(target_path, drafter_gguf, tokens, tmp_path):
    scaled = edit_gguf(drafter_gguf, tmp_path / "yarn.gguf", metadata={"dflash.rope.scaling.type": "yarn"})
    with pytest.raises(EvidenceError, match=r"does not compute dflash\.rope\.scaling\.type"):
        parity(target_path, scaled, tokens, options=options())
