"""vLLM's speculators format, DFlash and DFlash 2: flat keys, shifted taps, own head of a reduced vocabulary."""

import re

import numpy as np
import pytest
from gguf import GGUFReader

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from dialect_pairs import assert_drafts_equal, make_f32_target  # noqa: E402
from factories import HIDDEN, VOCAB, drafter_config  # noqa: E402
from factories_dialects import (  # noqa: E402
    lively_tensors,
    plain_drafter,
    speculators_checkpoint,
    speculators_config,
)

from dflash2.converter import Overrides, convert  # noqa: E402
from dflash2.errors import CheckpointError, UnsupportedCheckpointError  # noqa: E402
from dflash2.gguf_info import read_gguf_info  # noqa: E402

WINDOW = 32
IDS = tuple(range(3, VOCAB, 3))


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return make_f32_target(tmp_path_factory.mktemp("target"))


CASES = {
    "as trained": ({}, {}, {}),
    "bidirectional windows": ({}, {"sliding_window_non_causal": True}, {"causal": (False, False)}),
    "causal windows": ({}, {"sliding_window_non_causal": False}, {"causal": (True, True)}),
    "full": ({"layer_types": ["full_attention"] * 2}, {}, {"window": (None, None), "causal": (False, False)}),
    "windows forgotten": ({"use_sliding_window": False}, {}, {"window": (None, None), "causal": (False, False)}),
    "heads are rotated whole": ({"partial_rotary_factor": 0.5}, {}, {}),
    "the rope of sliding layers": (
        {"rope_theta": 1e6},
        {"rope_parameters": {"sliding_attention": {"rope_theta": 1e6}, "full_attention": {"rope_theta": 5.0}}},
        {},
    ),
    "taps at the embedding": ({"dflash_config": {"target_layer_ids": [-1, 2, 3]}}, {}, {}),
    "written by no package, but served": (
        {},
        {"speculators_version": None, "eagle_aux_hidden_state_layer_ids": [1, 3, 4]},
        {},
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("version", [1, 2])
def test_drafts_equal_the_reference(tmp_path, target, version, case):
    changes, stated, rules = CASES[case]
    drafter = drafter_config(version, **changes)
    tensors = lively_tensors(drafter)
    config = speculators_config(version, drafter, **stated)
    of_layers = ("partial_rotary_factor", "rope_parameters")
    config["transformer_layer_config"] |= {k: v for k, v in {**changes, **config}.items() if k in of_layers}
    folder = speculators_checkpoint(tmp_path / "drafter", config, tensors)
    # The package's defaults: DFlash slides causally, DFlash 2 does not.
    default = {"window": (WINDOW, WINDOW), "causal": (version == 1,) * 2}
    assert_drafts_equal(target, folder, plain_drafter(drafter, tensors, **default | rules), tmp_path)


@pytest.mark.parametrize("version", [1, 2])
def test_absent_causality_is_the_packages_default(tmp_path, target, version):
    drafter = drafter_config(version)
    config = speculators_config(version, drafter)
    del config["sliding_window_non_causal"]
    tensors = lively_tensors(drafter)
    folder = speculators_checkpoint(tmp_path / "drafter", config, tensors)
    reference = plain_drafter(drafter, tensors, window=(WINDOW,) * 2, causal=(version == 1,) * 2)
    assert_drafts_equal(target, folder, reference, tmp_path)


def test_mixed_layers_keep_both_causalities(tmp_path, target):
    drafter = drafter_config(1, layer_types=["sliding_attention", "full_attention"])
    folder = speculators_checkpoint(tmp_path / "drafter", speculators_config(1, drafter), lively_tensors(drafter))
    done = convert(folder, target.path, tmp_path / "out.gguf")
    metadata = read_gguf_info(tmp_path / "out.gguf").metadata
    assert metadata["dflash.attention.causal"] is False
    assert metadata["dflash.attention.causal_swa"] is True
    assert metadata["dflash.attention.sliding_window_pattern"] == (True, False)
    assert any("a patched one follows dflash.attention.causal_swa" in note for note in done.notes)


def own_tables(ids=range(VOCAB)):
    random = np.random.default_rng(3)
    return {
        "embed_tokens.weight": random.normal(0, 1, (VOCAB, HIDDEN)).astype(np.float32),
        "lm_head.weight": random.normal(0, 1, (len(ids), HIDDEN)).astype(np.float32),
    }


@pytest.mark.parametrize("with_embeddings", [False, True])
def test_reduced_vocabulary_is_drafted_from_the_own_head(tmp_path, target, with_embeddings):
    drafter = drafter_config(1)
    own = own_tables(IDS)
    if not with_embeddings:
        del own["embed_tokens.weight"]
    tensors = lively_tensors(drafter) | own
    config = speculators_config(1, drafter, draft_vocab_size=len(IDS))
    folder = speculators_checkpoint(tmp_path / "drafter", config, tensors, IDS)
    reference = plain_drafter(drafter, tensors, window=(WINDOW,) * 2, causal=(True,) * 2, head_rows=IDS)
    conversion = assert_drafts_equal(target, folder, reference, tmp_path)
    written = {tensor.name: tensor for tensor in read_gguf_info(conversion.output).tensors}
    assert (written["d2t"].type_name, written["d2t"].shape) == ("I64", (len(IDS),))
    assert written["output.weight"].shape == (HIDDEN, len(IDS))
    assert ("token_embd.weight" in written) == with_embeddings


def test_own_embeddings_and_head_of_the_whole_vocabulary_are_carried(tmp_path, target):
    drafter = drafter_config(2)
    tensors = lively_tensors(drafter) | own_tables()
    unused = {"verifier_lm_head.weight": tensors["lm_head.weight"], "verifier_norm.weight": np.ones(HIDDEN, np.float32)}
    folder = speculators_checkpoint(
        tmp_path / "drafter", speculators_config(2, drafter), tensors | unused, range(VOCAB)
    )
    reference = plain_drafter(drafter, tensors, window=(WINDOW,) * 2)
    assert_drafts_equal(target, folder, reference, tmp_path)


def test_a_head_alone_is_a_copy_of_the_targets_and_left_out(tmp_path, target):
    drafter = drafter_config(1)
    tensors = lively_tensors(drafter)
    head = {"lm_head.weight": own_tables()["lm_head.weight"]}
    folder = speculators_checkpoint(tmp_path / "drafter", speculators_config(1, drafter), tensors | head)
    reference = plain_drafter(drafter, tensors, window=(WINDOW,) * 2, causal=(True,) * 2)
    done = assert_drafts_equal(target, folder, reference, tmp_path)
    assert "lm_head.weight left out: the drafter uses the target's embeddings and head." in done.notes


@pytest.mark.parametrize(("convention", "shift"), [("outputs", 1), ("inputs", 0)])
def test_user_settles_what_tap_ids_name(tmp_path, target, convention, shift):
    drafter = drafter_config(1)
    config = speculators_config(1, drafter, speculators_version=None)
    folder = speculators_checkpoint(tmp_path / "drafter", config, lively_tensors(drafter))
    convert(folder, target.path, tmp_path / "out.gguf", overrides=Overrides(tap_ids=convention))
    taps = read_gguf_info(tmp_path / "out.gguf").metadata["dflash.target_layers"]
    assert taps == tuple(layer + shift for layer in config["aux_hidden_state_layer_ids"])


def test_served_ids_one_higher_name_outputs(tmp_path, target):
    drafter = drafter_config(1)
    config = speculators_config(1, drafter, aux_hidden_state_layer_ids=[0, 2, 3])
    config["eagle_aux_hidden_state_layer_ids"] = [1, 3, 4]
    folder = speculators_checkpoint(tmp_path / "drafter", config, lively_tensors(drafter))
    convert(folder, target.path, tmp_path / "out.gguf")
    assert read_gguf_info(tmp_path / "out.gguf").metadata["dflash.target_layers"] == (1, 3, 4)


_OPEN_TAPS = (
    "'aux_hidden_state_layer_ids' may name layers by their output or by their input; say which with"
    " --tap-ids outputs|inputs."
)
REFUSALS = {
    "taps of an unknown writer": ({"speculators_version": None}, _OPEN_TAPS),
    "taps that the served ids contradict": ({"eagle_aux_hidden_state_layer_ids": [7, 8, 9]}, _OPEN_TAPS),
    "anchor": ({"sample_from_anchor": True}, "'sample_from_anchor' is true, but llama.cpp drafts behind the anchor"),
    "two widths": ({"target_hidden_size": 128}, "'target_hidden_size' is 128 and the drafter's 'hidden_size' 64"),
    "no block": ({"block_size": None}, "'block_size' is missing; add the value the drafter was trained with, or give"),
    "no mask": ({"mask_token_id": None}, "'mask_token_id' is missing; add the value the drafter was trained with, or"),
    "no layers": ({"transformer_layer_config": None}, "'transformer_layer_config.hidden_size' is missing"),
    "too many rows": ({"draft_vocab_size": 300}, "'draft_vocab_size' is 300, more than the 288 tokens"),
    "other method": ({"speculators_model_type": "eagle3"}, "'speculators_model_type' 'eagle3' is not supported; known"),
    "DSpark": ({"speculators_model_type": "dspark"}, "is a DSpark drafter, another method with a Markov head"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_read_or_kept_is_refused(tmp_path, target, case):
    changes, message = REFUSALS[case]
    drafter = drafter_config(1)
    config = speculators_config(1, drafter, **changes)
    folder = speculators_checkpoint(tmp_path / "drafter", config, lively_tensors(drafter))
    with pytest.raises(CheckpointError, match=re.escape(message)) as refused:
        convert(folder, target.path, tmp_path / "out.gguf")
    assert str(refused.value).startswith(f"{folder}/config.json: ")
    assert not (tmp_path / "out.gguf").exists()


def test_a_selector_over_a_reduced_vocabulary_is_refused(tmp_path, target):
    drafter = drafter_config(2)
    config = speculators_config(2, drafter, draft_vocab_size=len(IDS))
    folder = speculators_checkpoint(tmp_path / "drafter", config, lively_tensors(drafter), IDS)
    with pytest.raises(UnsupportedCheckpointError, match="a DFlash 2 selector ranks the whole vocabulary of 288"):
        convert(folder, target.path, tmp_path / "out.gguf")


MAPS = {
    "no map": (lambda tensors: tensors.pop("d2t"), "lacks the tensor 'd2t', without which a head of 95 rows"),
    "absolute ids": (
        lambda tensors: tensors.update(d2t=np.array(IDS)),
        "leads out of the vocabulary of 288 tokens; it must hold id minus row",
    ),
    "a token twice": (
        lambda tensors: tensors.update(d2t=-np.arange(len(IDS))),
        "names a token twice",
    ),
    "other members": (
        lambda tensors: tensors.update(t2d=np.roll(tensors["t2d"], 1)),
        "and 't2d' name different tokens",
    ),
    "ids or offsets, and no members to tell": (
        lambda tensors: (tensors.update(d2t=np.arange(len(IDS)) * 2), tensors.pop("t2d")),
        "may hold token ids, or ids minus their row, and there is no 't2d' to tell; say which with --d2t offsets|abs",
    ),
    "offsets out of order, and no members to tell": (
        lambda tensors: (tensors.update(d2t=tensors["d2t"][::-1] - 3), tensors.pop("t2d")),
        "may hold token ids, or ids minus their row, and there is no 't2d' to tell",
    ),
    "floats": (
        lambda tensors: tensors.update(d2t=tensors["d2t"].astype(np.float32)),
        "tensor 'd2t' is F32 [95], not I64 or I32 [95]",
    ),
    "too short": (lambda tensors: tensors.update(d2t=tensors["d2t"][:-1]), "tensor 'd2t' is I64 [94], not I64 or"),
    "no head": (lambda tensors: tensors.pop("lm_head.weight"), "lacks the tensor 'lm_head.weight'"),
}


@pytest.mark.parametrize("case", MAPS)
def test_a_damaged_map_of_the_vocabulary_is_refused(tmp_path, target, case):
    damage, message = MAPS[case]
    drafter = drafter_config(1)
    members = np.zeros(VOCAB, bool)
    members[list(IDS)] = True
    tensors = lively_tensors(drafter) | own_tables(IDS)
    tensors |= {"d2t": np.array(IDS) - np.arange(len(IDS)), "t2d": members}
    damage(tensors)
    config = speculators_config(1, drafter, draft_vocab_size=len(IDS))
    folder = speculators_checkpoint(tmp_path / "drafter", config, tensors)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        convert(folder, target.path, tmp_path / "out.gguf")


@pytest.mark.parametrize(
    ("said", "held", "expected"),
    [
        (None, np.zeros(len(IDS), np.int64), range(len(IDS))),
        ("offsets", np.arange(len(IDS)) * 2, range(0, 3 * len(IDS), 3)),
        ("absolute", np.arange(len(IDS)) * 2, range(0, 2 * len(IDS), 2)),
    ],
)
def test_a_map_without_members_is_read_as_proven_or_as_the_user_says(tmp_path, target, said, held, expected):
    drafter = drafter_config(1)
    tensors = lively_tensors(drafter) | own_tables(IDS) | {"d2t": held}
    config = speculators_config(1, drafter, draft_vocab_size=len(IDS))
    folder = speculators_checkpoint(tmp_path / "drafter", config, tensors)
    convert(folder, target.path, tmp_path / "out.gguf", overrides=Overrides(d2t=said))
    tensor = next(tensor for tensor in GGUFReader(tmp_path / "out.gguf").tensors if tensor.name == "d2t")
    assert tensor.data.tolist() == list(expected)
