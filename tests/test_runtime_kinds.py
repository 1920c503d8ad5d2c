"""Every kind of target: greedy output with drafting is that without, whether the drafts are right or wrong."""

import numpy as np
import pytest
from factories_targets import KINDS, RECURRENT, copying_drafter, make_kind, random_drafter
from generation import EXACT
from generation import take_greedy as take
from gguf import GGMLQuantizationType
from gguf_edit import edit_gguf, values_of
from llama_cpp import Llama

from dflash2 import DFlashLlama
from dflash2.constants import SNAPSHOT_ARCHITECTURES
from dflash2.converter import convert

PROMPT = [40, 60, 70, 41, 99]
N_TOKENS = 300


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("targets")
    return {kind: make_kind(folder / f"{kind}.gguf", kind) for kind in KINDS}


@pytest.fixture(scope="module")
def drafters(targets, tmp_path_factory):
    """Path of a drafter for a target, by what it is."""
    folder = tmp_path_factory.mktemp("drafters")
    made = {}

    def drafter(kind, nature):
        if (kind, nature) not in made:
            checkpoint = {
                "copying": lambda: copying_drafter(folder / f"{kind}-copying", targets[kind]),
                "random": lambda: random_drafter(folder / "random"),
                "v1": lambda: random_drafter(folder / "v1", 1),
            }[nature]()
            made[kind, nature] = folder / f"{kind}-{nature}.gguf"
            convert(checkpoint, targets[kind], made[kind, nature], outtype="f32")
        return made[kind, nature]

    return drafter


@pytest.fixture(scope="module")
def expected(targets):
    """Tokens of `llama_cpp.Llama` for each kind."""
    tokens = {}
    for kind, path in targets.items():
        plain = Llama(str(path), **EXACT)
        tokens[kind] = take(plain, PROMPT, N_TOKENS)
        plain.close()
    return tokens


# Acceptance of a drafter that knows what the target mostly does, and of one that is right by chance.
NATURES = {"copying": (0.3, 1.0), "random": (0.0, 0.15), "v1": (0.0, 0.15)}


@pytest.mark.parametrize("nature", NATURES)
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_equal_those_of_plain_llama(targets, drafters, expected, kind, nature):
    drafted = DFlashLlama(targets[kind], drafters(kind, nature), depth=None, auto_disable=False, **EXACT)
    assert take(drafted, PROMPT, N_TOKENS) == expected[kind]
    low, high = NATURES[nature]
    assert low <= drafted.stats.acceptance <= high
    assert drafted.stats.accepted < drafted.stats.drafted  # rejected ones in every case
    if nature == "copying":
        assert drafted.stats.accepted_at[-1] > 0  # whole blocks too
    drafted.close()


@pytest.mark.parametrize("kind", ["gemma4", "gpt-oss"])
def test_a_target_with_a_windowed_cache_gives_the_same_tokens(targets, drafters, expected, kind):
    drafted = DFlashLlama(
        targets[kind], drafters(kind, "copying"), swa_full=False, depth=None, auto_disable=False, **EXACT
    )
    assert take(drafted, PROMPT, N_TOKENS) == expected[kind]
    again = PROMPT + expected[kind][:100]  # far behind the window by now
    assert take(drafted, again, 150) == expected[kind][100:250]
    drafted.close()


@pytest.mark.parametrize("kind", RECURRENT)
def test_snapshots_are_as_many_as_the_depth_needs_and_only_where_llama_cpp_keeps_any(targets, drafters, expected, kind):
    drafted = DFlashLlama(targets[kind], drafters(kind, "copying"), depth=3, auto_disable=False, **EXACT)
    assert drafted._session.target.snapshots == (3 if kind in SNAPSHOT_ARCHITECTURES else 0)
    assert take(drafted, PROMPT, 100) == expected[kind][:100]
    drafted.close()


@pytest.mark.parametrize("kind", RECURRENT)
def test_small_batches_step_back_too(targets, drafters, kind):
    sizes = {"n_batch": 24, "n_ubatch": 12}
    drafted = DFlashLlama(
        targets[kind], drafters(kind, "copying"), depth=None, auto_disable=False, **{**EXACT, **sizes}
    )
    plain = Llama(str(targets[kind]), **{**EXACT, **sizes})
    prompt = [*PROMPT, *range(60, 120)]
    assert take(drafted, prompt, 100) == take(plain, prompt, 100)
    assert drafted.stats.accepted > 0
    drafted.close()
    plain.close()


def test_a_depth_set_later_where_no_snapshots_are_kept_goes_by_saved_states(targets, drafters, expected):
    drafted = DFlashLlama(targets["lfm2"], drafters("lfm2", "copying"), depth=0, auto_disable=False, **EXACT)
    drafted.depth = 5
    assert drafted._session.target.snapshots == 0
    assert take(drafted, PROMPT, N_TOKENS) == expected["lfm2"]
    assert drafted.stats.accepted > 0
    drafted.close()


@pytest.mark.parametrize("kind", RECURRENT)
def test_a_state_is_never_taken_from_another_decode(targets, drafters, kind):
    """llama.cpp steps back by snapshots that the last decode did not write, without a word."""
    drafted = DFlashLlama(targets[kind], drafters(kind, "copying"), **EXACT)
    plain = Llama(str(targets[kind]), **EXACT)
    drafted.eval([50, 51, 52, 53, 54, 55, 56])
    drafted.eval([57])
    for tokens in ([50, 51, 52, 53, 54, 90, 91], [50, 51, 52, 92]):
        assert take(drafted, tokens, 20) == take(plain, tokens, 20)
    drafted.close()
    plain.close()


def reduced(drafter, target, path, tokens):
    """`drafter` with a head of its own over `tokens` only."""
    head = values_of(target, "output.weight")[tokens]
    tensors = {
        "d2t": (np.array(tokens, np.int64), GGMLQuantizationType.I64),
        "output.weight": (head, GGMLQuantizationType.F32),
    }
    return edit_gguf(drafter, path, tensors=tensors)


def test_a_reduced_vocabulary_drafts_as_well_if_it_holds_what_the_target_says(targets, drafters, expected, tmp_path):
    drafter = drafters("qwen35", "copying")
    rates = {}
    for name, path in {
        "whole": drafter,
        "reduced": reduced(drafter, targets["qwen35"], tmp_path / "reduced.gguf", [*range(40, 48), *range(100, 140)]),
        "useless": reduced(drafter, targets["qwen35"], tmp_path / "useless.gguf", list(range(100, 164))),
    }.items():
        drafted = DFlashLlama(targets["qwen35"], path, depth=None, auto_disable=False, **EXACT)
        assert take(drafted, PROMPT, N_TOKENS) == expected["qwen35"]
        rates[name] = drafted.stats.acceptance
        drafted.close()
    assert rates["reduced"] == rates["whole"] > 0.3
    assert rates["useless"] < 0.05


def test_a_drafter_with_embeddings_and_head_of_its_own(targets, drafters, expected, tmp_path):
    drafter = drafters("qwen35", "copying")
    names = ("token_embd.weight", "output.weight")
    own = {name: (values_of(targets["qwen35"], name), GGMLQuantizationType.F32) for name in names}
    path = edit_gguf(drafter, tmp_path / "own.gguf", tensors=own)
    drafted = DFlashLlama(targets["qwen35"], path, depth=None, auto_disable=False, device_draft=(), **EXACT)
    assert take(drafted, PROMPT, N_TOKENS) == expected["qwen35"]
    assert drafted.stats.acceptance > 0.3
    drafted.close()
