"""Targets that only a patched library taps: greedy output with drafting is that without."""

import pytest
from factories_patched_targets import PATCHED_KINDS
from factories_targets import LAYERS, copying_drafter, make_kind, random_drafter
from patched_library import patched_folder, run_patched
from test_converter_architectures import architectures

from dflash2.constants import FINAL_TAP_ARCHITECTURES, TAPPABLE_ARCHITECTURES
from dflash2.converter import convert
from dflash2.patches import source

PROMPT = [40, 60, 70, 41, 99]
LONG_PROMPT = [*PROMPT, *range(60, 160)]
N_TOKENS = 300
# Acceptance of a drafter that knows what the target mostly does, and of one that is right by chance.
NATURES = {"copying": (0.25, 1.0), "random": (0.0, 0.15)}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Results of every kind with every drafter, all made in one process with the patched library."""
    folder = patched_folder()
    scratch = tmp_path_factory.mktemp("patched")
    random = random_drafter(scratch / "random")
    jobs = {"taps": {"ask": "taps"}}
    for kind, layout in PATCHED_KINDS.items():
        target = make_kind(scratch / f"{kind}.gguf", kind, layout)
        checkpoints = {"copying": copying_drafter(scratch / f"{kind}-copying", target), "random": random}
        if kind == "laguna":
            # Its published drafters tap the last layer's output.
            taps = {"block_size": 8, "mask_token_id": 1, "target_layer_ids": [0, 2, LAYERS - 1]}
            taps |= {"selector_rank": 32, "selector_top_k": 8}
            checkpoints["final"] = random_drafter(scratch / "final", dflash_config=taps)
        for nature, checkpoint in checkpoints.items():
            drafter = scratch / f"{kind}-{nature}.gguf"
            convert(checkpoint, target, drafter, outtype="f32")
            jobs[f"{kind} {nature}"] = {
                "target": str(target),
                "drafter": str(drafter),
                "prompts": [PROMPT, LONG_PROMPT],
                "n_tokens": N_TOKENS,
                "options": {},
            }
    return run_patched(folder, scratch, jobs)


@pytest.mark.parametrize("nature", NATURES)
@pytest.mark.parametrize("kind", PATCHED_KINDS)
def test_greedy_tokens_equal_those_of_plain_llama(results, kind, nature):
    result = results[f"{kind} {nature}"]
    assert result["patched"]
    assert [len(tokens) for tokens in result["plain"]] == [N_TOKENS, N_TOKENS]
    assert result["drafted"] == result["plain"]
    low, high = NATURES[nature]
    assert low <= result["accepted"] / result["proposed"] <= high
    assert result["accepted"] < result["proposed"]
    if nature == "copying":
        assert result["whole_blocks"] > 0


def test_the_last_layers_output_can_be_tapped_where_published_drafters_do(results):
    result = results["laguna final"]
    assert result["drafted"] == result["plain"] == results["laguna random"]["plain"]
    assert result["proposed"] > 100


def test_the_library_says_what_its_source_publishes(results, patched_source):
    assert set(results["taps"]["tappable"]) == architectures(patched_source, "t_layer_inp[")
    assert set(results["taps"]["final"]) == architectures(patched_source, "t_layer_inp[n_layer]")
    assert set(results["taps"]["tappable"]) - TAPPABLE_ARCHITECTURES >= set(PATCHED_KINDS)
    assert set(results["taps"]["final"]) - FINAL_TAP_ARCHITECTURES == {"laguna"}
