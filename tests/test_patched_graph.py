"""The patched draft context: the same drafts as stock from fewer nodes, per-layer causality, graphs that stay alive.

Each run of it is a process (see graph_probe.py).
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from factories import VOCAB, drafter_config, write_checkpoint
from generation import EXACT

from dflash2.converter import convert

PROBE = Path(__file__).with_name("graph_probe.py")
LIBRARY_VARIABLES = ("DFLASH2_LIBRARY", "LLAMA_CPP_LIB_PATH")
SWITCHES = ("DFLASH2_NO_CAUSAL_SWA", "DFLASH2_NO_LEAN_GRAPH", "DFLASH2_NO_GRAPH_PAIR", "DFLASH2_NO_WHOLE_BLOCKS")
N_PROMPTS, N_TOKENS = 3, 60
BLOCK, LAYERS = 8, 2
CONVOLUTION = "REPEAT ADD MUL MUL ACC"
SELECTOR = "TOP_K GET_ROWS GET_ROWS SET GET_ROWS MUL MUL_MAT ADD CPY CONCAT"
WINDOW = 16
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW, "use_sliding_window": True}
# What PyTorch computes: caches in F32, and attention without the F16 tiles of flash attention.
F32_CACHE = {"type_k": 0, "type_v": 0, "flash_attn": False}
# Other row counts round otherwise in F32: nothing else may differ where sequences share a batch.
ROUNDING = 1e-4
ONE_ULP = 2e-6  # of scores between 8 and 16, twice


@pytest.fixture
def probe(patched, tmp_path):
    """Runs a job under the patched library with the switches `off` set, or under the stock one."""

    def run(kind, target, drafter, *off, stock=False, **job):
        chosen = {"DFLASH2_LIBRARY": "stock"} if stock else dict.fromkeys(LIBRARY_VARIABLES, str(patched.libraries))
        kept = {name: value for name, value in os.environ.items() if name not in (*SWITCHES, *LIBRARY_VARIABLES)}
        described = {"kind": kind, "target": str(target), "drafter": str(drafter), **job}
        (tmp_path / "job.json").write_text(json.dumps(described))
        command = [sys.executable, str(PROBE), str(tmp_path / "job.json"), str(tmp_path / "result.npz")]
        environment = {**kept, **chosen, **dict.fromkeys(off, "1")}
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        with np.load(tmp_path / "result.npz") as result:
            return dict(result)

    return run


@pytest.fixture
def cycles(probe, target_path, prompts):
    """Greedy cycles of the demo target with a drafter."""

    def run(drafter, *off, **job):
        job = {"prompts": prompts[:N_PROMPTS], "n_tokens": N_TOKENS, "options": EXACT, **job}
        return probe("cycles", target_path, drafter, *off, **job)

    return run


def used(lattices):
    """What the selector reads of [cycles, rows, K + K*K]: of the first row only the scores after predecessor 0."""
    top_k = int(np.sqrt(lattices.shape[2]))
    lattices = lattices.copy()
    lattices[:, 0, 2 * top_k :] = 0
    return lattices


def test_the_lean_graph_leaves_the_lattice_of_upstreams_graph(cycles, drafter_gguf):
    lean = cycles(drafter_gguf)
    upstreams = cycles(drafter_gguf, "DFLASH2_NO_LEAN_GRAPH")
    assert len(lean["lattices"]) > 50
    assert np.array_equal(lean["lattices"][:, 1:], upstreams["lattices"][:, 1:])
    # Position 1 is multiplied with the others, by another routine than one row alone.
    assert np.abs(used(lean["lattices"]) - used(upstreams["lattices"])).max() < ONE_ULP
    assert np.array_equal(lean["proposals"], upstreams["proposals"])
    assert np.array_equal(lean["tokens"], upstreams["tokens"])


def test_a_convolution_is_five_nodes_in_a_row(probe, target_path, drafter_gguf, prompts):
    job = {"prompts": prompts[:1], "n_tokens": 12, "options": EXACT}
    lean = " ".join(probe("nodes", target_path, drafter_gguf, **job)["nodes"])
    upstreams = probe("nodes", target_path, drafter_gguf, "DFLASH2_NO_LEAN_GRAPH", **job)["nodes"]
    assert lean.count(CONVOLUTION) == 2 * 2 * LAYERS
    assert lean.endswith(SELECTOR)
    assert "PAD" not in lean
    assert "CONT" not in lean.replace("CONCAT", "")
    assert (len(lean.split()), len(upstreams)) == (105, 161)


def test_proposals_are_those_of_the_stock_library(cycles, drafter_gguf):
    ours, stock = cycles(drafter_gguf), cycles(drafter_gguf, stock=True)
    assert len(ours["proposals"]) > 50
    assert np.array_equal(ours["positions"], stock["positions"])
    assert np.array_equal(ours["proposals"], stock["proposals"])
    assert np.array_equal(ours["tokens"], stock["tokens"])


@pytest.mark.parametrize("version", ["drafter_gguf", "drafter_v1_gguf"])
def test_no_graph_is_rebuilt_after_warm_up(cycles, request, version):
    drafter = request.getfixturevalue(version)
    kept = cycles(drafter)
    built = np.diff(kept["rebuilds"])
    # One graph for each number of accepted rows, the draft's own, and what every prompt takes with it.
    assert built.sum() <= BLOCK + 2 * N_PROMPTS
    assert not built[len(built) // 3 :].any() or built[len(built) // 3 :].sum() <= 2 * N_PROMPTS
    alternating = cycles(drafter, "DFLASH2_NO_GRAPH_PAIR")
    assert np.diff(alternating["rebuilds"]).mean() > 1.9
    assert np.array_equal(kept["proposals"], alternating["proposals"])


def test_a_v1_drafter_drafts_as_with_the_stock_library(cycles, drafter_v1_gguf):
    ours, stock = cycles(drafter_v1_gguf), cycles(drafter_v1_gguf, stock=True)
    assert len(ours["proposals"]) > 50
    assert np.array_equal(ours["proposals"], stock["proposals"])


@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("version", ["drafter_gguf", "drafter_v1_gguf"])
@pytest.mark.parametrize("widths", [(8, 8, 8), (8, 3, 5), (2, 8, 8)])
def test_sequences_in_one_batch_draft_as_alone(probe, target_path, request, unified, version, widths):
    drafter = request.getfixturevalue(version)
    blocks = [[sequence, 20 + 7 * sequence, width] for sequence, width in enumerate(widths)]
    together = probe("sequences", target_path, drafter, unified=unified, blocks=blocks)
    for i, block in enumerate(blocks):
        alone = probe("sequences", target_path, drafter, unified=unified, blocks=[block])
        first, second = together[f"block{i}"], alone["block0"]
        if version == "drafter_gguf":
            first, second = used(first[None])[0], used(second[None])[0]
        assert np.abs(first - second).max() < ROUNDING


@dataclass(frozen=True)
class Cycle:
    """One cycle of a probe, as `compared` reads it."""

    anchor: int
    position: int
    proposal: list[int]


def test_sliding_layers_are_causal_where_the_file_says_so(probe, tmp_path):
    """A mixed drafter without `is_causal`: its sliding layers are causal, its full ones are not, as in PyTorch."""
    pytest.importorskip("torch")
    from dialect_pairs import LEAST_BLOCKS, compared, make_f32_target
    from factories_dialects import lively_tensors, plain_drafter

    target = make_f32_target(tmp_path)
    config = drafter_config(2, without=["is_causal"], **MIXED)
    tensors = lively_tensors(config)
    folder = write_checkpoint(tmp_path / "drafter", config, tensors, dtype="F32")
    convert(folder, target.path, tmp_path / "drafter.gguf", outtype="f32")
    reference = plain_drafter(config, tensors, window=(WINDOW, None), causal=(True, False))

    prompts = np.random.default_rng(7).integers(2, VOCAB, (3, 60)).tolist()
    job = {"prompts": prompts, "n_tokens": 24, "options": {**EXACT, "n_ctx": 128, **F32_CACHE}}
    pair = (target.path, tmp_path / "drafter.gguf")
    ours = probe("cycles", *pair, **job)
    blocks = []
    for prompt, anchor, position, proposal in zip(
        ours["prompts"], ours["anchors"], ours["positions"], ours["proposals"], strict=True
    ):
        tokens = prompts[prompt] + ours["tokens"][prompt].tolist()
        blocks.append(compared(target, reference, tokens, Cycle(int(anchor), int(position), proposal.tolist())))
    assert len(blocks) >= LEAST_BLOCKS
    assert [block for block in blocks if block.ours != block.reference] == []

    stock, off = probe("cycles", *pair, stock=True, **job), probe("cycles", *pair, "DFLASH2_NO_CAUSAL_SWA", **job)
    assert np.array_equal(off["proposals"], stock["proposals"])
    assert not np.array_equal(ours["proposals"], stock["proposals"])


def test_blocks_of_unequal_width_were_cut_before(probe, target_path, drafter_gguf):
    """The comparison above has teeth: upstream's split drafts the wider block's last rows as a block of their own."""
    blocks = [[0, 20, 8], [1, 27, 3]]
    whole = probe("sequences", target_path, drafter_gguf, unified=False, blocks=blocks)
    cut = probe("sequences", target_path, drafter_gguf, "DFLASH2_NO_WHOLE_BLOCKS", unified=False, blocks=blocks)
    assert np.abs(used(whole["block0"][None]) - used(cut["block0"][None])).max() > 100 * ROUNDING
