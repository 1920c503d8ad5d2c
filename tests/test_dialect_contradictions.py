"""Configs that say a thing twice, in the wrong place, or ask for what llama.cpp's graph does not compute."""

import re

import numpy as np
import pytest
from factories import HIDDEN, VOCAB, drafter_config, drafter_tensors, make_target, write_checkpoint
from factories_dialects import muse_checkpoint, speculators_checkpoint, speculators_config

from dflash2.converter import Overrides, convert
from dflash2.errors import CheckpointError
from dflash2.gguf_info import read_gguf_info

FULL = ["full_attention"] * 2
TWICE = "is another value in 'dflash_config' than at the top level; remove the one that is wrong"
MISPLACED = "is not looked at there; move it to the top level"


def inner(**keys):
    return {"dflash_config": keys}


@pytest.fixture
def target(tmp_path):
    return make_target(tmp_path / "target.gguf")


def convert_with(tmp_path, target, changes, tensors=None, **overrides):
    config = drafter_config(1, **changes)
    folder = write_checkpoint(tmp_path / "drafter", config, drafter_tensors(config) | (tensors or {}))
    return convert(folder, target, tmp_path / "out.gguf", overrides=Overrides(**overrides))


CASES = {
    "taps twice": ({"target_layer_ids": [1, 2, 3]}, f"'target_layer_ids' {TWICE}"),
    "window twice": (inner(sliding_window=16), f"'sliding_window' {TWICE}"),
    "kinds twice": (inner(layer_types=FULL), f"'layer_types' {TWICE}"),
    "kinds inside": (inner(layer_types=FULL) | {"layer_types": None}, f"'dflash_config.layer_types' {MISPLACED}"),
    "window inside": (
        inner(sliding_window=16) | {"sliding_window": None},
        f"'dflash_config.sliding_window' {MISPLACED}",
    ),
    "half rope inside": (inner(partial_rotary_factor=0.5), f"'dflash_config.partial_rotary_factor' {MISPLACED}"),
    "pairs inside": (inner(rope_is_neox_style=False), f"'dflash_config.rope_is_neox_style' {MISPLACED}"),
    "causality inside": (inner(is_causal=True) | {"is_causal": None}, f"'dflash_config.is_causal' {MISPLACED}"),
    "two types of rope": (
        {"rope_scaling": {"rope_type": "linear", "type": "yarn", "factor": 2.0}},
        "'rope_scaling.rope_type' is 'linear' and 'type' 'yarn'; remove the one that is wrong",
    ),
    "a rope beside one per kind": (
        {"rope_parameters": {"full_attention": {"rope_theta": 1e4}, "rope_theta": 5.0}},
        "'rope_parameters' has 'rope_theta' beside a rope per kind of layer; remove what is wrong",
    ),
    "two bases": (
        {"rope_parameters": {"rope_theta": 5e5}},
        "'rope_parameters.rope_theta' is 500000.0 and 'rope_theta' 10000.0; remove the one that is wrong, or give it"
        " with --rope-theta",
    ),
    "two rotated parts": (
        {"rope_parameters": {"partial_rotary_factor": 0.5}, "partial_rotary_factor": 1.0},
        "'rope_parameters.partial_rotary_factor' is 0.5 and 'partial_rotary_factor' 1.0; remove the one that is wrong",
    ),
    "a reduced vocabulary": ({"draft_vocab_size": 100}, "'draft_vocab_size' is 100 and 'vocab_size' 288; only specul"),
}
FOREIGN = {
    "attn_logit_softcapping": 50.0,
    "attn_output_gate": True,
    "attention_multiplier": 0.5,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.2,
    "logit_scale": 0.5,
    "logits_scaling": 8.0,
    "mlp_bias": True,
    "query_pre_attn_scalar": 256,
    "clip_qkv": 8.0,
    "use_qk_norm": False,
}


@pytest.mark.parametrize("case", CASES)
def test_contradictions_are_refused_with_both_places_named(tmp_path, target, case):
    changes, message = CASES[case]
    with pytest.raises(CheckpointError, match=re.escape(message)):
        convert_with(tmp_path, target, changes)


@pytest.mark.parametrize("level", ["top", "dflash_config"])
@pytest.mark.parametrize("key", FOREIGN)
def test_what_the_graph_does_not_compute_is_refused_by_its_key(tmp_path, target, key, level):
    stated = {key: FOREIGN[key]}
    with pytest.raises(CheckpointError, match=f"'{key}' is .*, which llama.cpp's dflash graph does not compute"):
        convert_with(tmp_path, target, stated if level == "top" else inner(**stated))


def test_neutral_values_and_equal_repetitions_are_taken(tmp_path, target):
    neutral = dict.fromkeys(FOREIGN) | {"mlp_bias": False, "logits_scaling": 1.0, "attn_logit_softcapping": 0.0}
    same = inner(sliding_window=32, is_causal=False, use_swa=False, swa_window_size=16)
    same_top = {"query_pre_attn_scalar": 16, "attention_multiplier": 0.25, "draft_vocab_size": VOCAB}
    assert convert_with(tmp_path, target, {**neutral, **same, **same_top}).notes == ()


def test_the_user_settles_two_bases(tmp_path, target):
    convert_with(tmp_path, target, {"rope_parameters": {"rope_theta": 5e5}}, rope_theta=5e5)
    assert read_gguf_info(tmp_path / "out.gguf").metadata["dflash.rope.freq_base"] == 5e5


NOTES = {
    "two causalities": (inner(causal=True), "'is_causal' False goes before 'causal' True, as in the reference."),
    "a window of no layer": (inner(swa_window_size=16), "'swa_window_size' is not used: 'use_swa' is absent."),
}


@pytest.mark.parametrize("case", NOTES)
def test_what_is_not_used_is_told(tmp_path, target, case):
    changes, note = NOTES[case]
    assert convert_with(tmp_path, target, changes).notes == (note,)


ONE, OTHER = np.zeros((VOCAB, HIDDEN), np.float32), np.ones((VOCAB, HIDDEN), np.float32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"has_lm_head": False}, "tensor 'lm_head.weight' is there, but 'has_lm_head' is false"),
        ({"tie_word_embeddings": True}, "'lm_head.weight' differs from 'embed_tokens.weight', but 'tie_word_embeddi"),
    ],
)
def test_a_head_that_the_config_denies_is_refused(tmp_path, target, changes, message):
    with pytest.raises(CheckpointError, match=re.escape(message)):
        convert_with(tmp_path, target, changes, {"embed_tokens.weight": ONE, "lm_head.weight": OTHER})


def test_a_tied_head_stored_twice_is_kept(tmp_path, target):
    tables = {"embed_tokens.weight": ONE, "lm_head.weight": ONE}
    convert_with(tmp_path, target, {"tie_word_embeddings": True}, tables)
    names = {tensor.name for tensor in read_gguf_info(tmp_path / "out.gguf").tensors}
    assert {"token_embd.weight", "output.weight"} <= names


def test_other_layouts_are_held_to_the_same(tmp_path, target):
    plain = drafter_tensors(drafter_config(1))
    muse = muse_checkpoint(tmp_path / "muse", plain, draft_vocab_size=100)
    config = speculators_config(1)
    config["transformer_layer_config"] |= {"mlp_bias": True}
    foreign = speculators_checkpoint(tmp_path / "foreign", config, plain)
    config = speculators_config(1)
    config["transformer_layer_config"]["rope_parameters"] |= {"sliding_attention": {"rope_theta": 1e4}}
    flat = speculators_checkpoint(tmp_path / "flat", config, plain)
    for folder, message in (
        (muse, "'draft_vocab_size' is 100"),
        (foreign, "'mlp_bias' is True"),
        (flat, "'transformer_layer_config.rope_parameters' has 'rope_theta' beside"),
    ):
        with pytest.raises(CheckpointError, match=re.escape(message)):
            convert(folder, target, tmp_path / "out.gguf")
