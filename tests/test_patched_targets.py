"""Targets that only a patched library taps: greedy output with drafting is that without."""

import shutil
import subprocess

import pytest
from factories_patched_targets import PATCHED_KINDS
from factories_targets import LAYERS, copying_drafter, make_kind, random_drafter
from host_programs import CPP, PATCHES, compile_program, run_program
from patched_library import run_patched
from test_converter_architectures import architectures

from dflash2 import native
from dflash2.constants import FINAL_TAP_ARCHITECTURES, TAPPABLE_ARCHITECTURES
from dflash2.converter import convert

PATCH = "0050-layer-inputs.patch"
PROMPT = [40, 60, 70, 41, 99]
LONG_PROMPT = [*PROMPT, *range(60, 160)]
N_TOKENS = 300
# Acceptance of a drafter that knows what the target mostly does, and of one that is right by chance.
NATURES = {"copying": (0.15, 1.0), "random": (0.0, 0.1)}


@pytest.fixture(scope="module")
def results(patched, tmp_path_factory):
    """Results of every kind with every drafter, all made in one process with the patched library."""
    scratch = tmp_path_factory.mktemp("patched")
    random = random_drafter(scratch / "random")
    jobs = {"taps": {"ask": "taps"}}
    for kind, layout in PATCHED_KINDS.items():
        target = make_kind(scratch / f"{kind}.gguf", kind, layout)
        checkpoints = {"copying": copying_drafter(scratch / f"{kind}-copying", target), "random": random}
        if kind == "laguna":
            # Its published drafters tap the last layer's output.
            checkpoints["final"] = random_drafter(scratch / "final", taps=(0, 2, LAYERS - 1))
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
    return run_patched(patched.libraries, scratch, jobs)


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


@pytest.fixture(scope="module")
def added(llama_cpp_source, tmp_path_factory):
    """What the patched source publishes and stock does not: (layer inputs, last layer's output)."""
    tree = tmp_path_factory.mktemp("tree")
    shutil.copytree(llama_cpp_source / "src", tree / "src")
    subprocess.run(["patch", "-p1", "-F0", "-s", "-i", str(PATCHES / "llama" / PATCH)], cwd=tree, check=True)
    inputs, outputs = (architectures(tree, f"t_layer_inp[{index}") for index in ("", "n_layer]"))
    return inputs - TAPPABLE_ARCHITECTURES, outputs - FINAL_TAP_ARCHITECTURES


def test_the_list_in_the_library_is_what_the_patched_source_publishes(added, llama_cpp_source, tmp_path):
    sources = [CPP / "taps.cpp", PATCHES / "src" / "src" / "models" / "dflash2-taps.cpp"]
    include = [PATCHES / "src" / "include", llama_cpp_source / "include", llama_cpp_source / "ggml" / "include"]
    said, _ = run_program(compile_program(tmp_path / "taps", sources, include))
    assert [set(line.split(",")) for line in said.splitlines()] == list(added)
    assert added[0] >= set(PATCHED_KINDS)
    assert added[1] == {"laguna"}


def test_the_package_learns_the_list_from_the_library(results, added):
    assert set(results["taps"]["tappable"]) == TAPPABLE_ARCHITECTURES | added[0]
    assert set(results["taps"]["final"]) == FINAL_TAP_ARCHITECTURES | added[1]


def test_a_stock_library_adds_nothing():
    assert native.tappable_architectures() == TAPPABLE_ARCHITECTURES
    assert native.final_tap_architectures() == FINAL_TAP_ARCHITECTURES
