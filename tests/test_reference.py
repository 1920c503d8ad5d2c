"""Drafts equal those of the PyTorch reference (package `dflash`), block by block, along the tokens we generated."""

from dataclasses import dataclass

import pytest

from dflash2 import DFlashLlama
from dflash2.evidence import scaled_target

pytest.importorskip("torch")
pytest.importorskip("transformers")
dflash = pytest.importorskip("dflash.model")

from reference_pair import Reference  # noqa: E402  (needs torch)

N_PROMPTS = 4
N_TOKENS = 100
LEAST_BLOCKS = 50
# llama.cpp multiplies a Q8_0 weight with activations rounded to 8 bits, so the features differ by about 1%.
LEAST_EQUAL_WITH_Q8_0_TARGET = 0.9
GGML_TYPE_F32 = 0
# What the reference computes: caches in F32, and attention without the F16 tiles of llama.cpp's flash attention.
EXACT = {"type_k": GGML_TYPE_F32, "type_v": GGML_TYPE_F32, "flash_attn": False}


@dataclass(frozen=True)
class Block:
    """One cycle of ours, and what the reference proposes at the same place."""

    prompt: int
    position: int
    ours: list[int]
    reference: list[int]


@pytest.fixture(scope="module", params=["v2", "v1"])
def drafter(request):
    """(reference class, checkpoint folder, F32 GGUF) of either drafter."""
    if request.param == "v2":
        names = ("DFlash2DraftModel", "drafter_dir", "drafter_gguf")
    else:
        names = ("DFlashDraftModel", "drafter_v1_dir", "drafter_v1_gguf")
    reference_class, folder, path = names
    return getattr(dflash, reference_class), request.getfixturevalue(folder), request.getfixturevalue(path)


def our_cycles(target, drafter_gguf, prompts, llama_kwargs):
    """Per prompt: all token ids, and the cycles that made them."""
    kwargs = {"n_ctx": 512, "n_threads": 1, "n_threads_batch": 1, "verbose": False, **llama_kwargs}
    llm = DFlashLlama(target, drafter_gguf, depth=None, auto_disable=False, **kwargs)
    for text in prompts:
        prompt, cycles = llm.tokenize(text.encode()), []
        llm.reset()
        llm.on_cycle = cycles.append
        stream = llm.generate(prompt, temp=0.0)
        tokens = [next(stream) for _ in range(N_TOKENS)]
        stream.close()
        yield prompt + tokens, cycles
    llm.close()


def compare(target, drafter, prompts, **llama_kwargs):
    """Every cycle of ours as a Block."""
    reference_class, folder, path = drafter
    reference = Reference(target, reference_class, folder)
    blocks = []
    for number, (tokens, cycles) in enumerate(our_cycles(target, path, prompts[:N_PROMPTS], llama_kwargs)):
        features = reference.features(tokens)
        for cycle in cycles:
            proposal = reference.proposal(features, cycle.anchor, cycle.position)
            blocks.append(Block(number, cycle.position, list(cycle.proposal), proposal))
    assert len(blocks) >= LEAST_BLOCKS
    return blocks


def test_drafts_equal_the_reference(drafter, target_path, prompts):
    """The same numbers on both sides: the target's weights dequantised to F32, an F32 drafter, F32 caches."""
    target = scaled_target(target_path, parameters=0, weights="f32")
    blocks = compare(target, drafter, prompts, **EXACT)
    assert [block for block in blocks if block.ours != block.reference] == []


def test_drafts_on_the_quantised_target_follow_the_reference(drafter, target_path, prompts):
    blocks = compare(target_path, drafter, prompts)
    equal = sum(block.ours == block.reference for block in blocks)
    assert equal >= LEAST_EQUAL_WITH_Q8_0_TARGET * len(blocks)


def test_a_tap_read_one_layer_off_would_be_noticed(drafter, target_path, prompts):
    """The comparison has teeth: the same reference with shifted taps proposes something else."""
    reference_class, folder, path = drafter
    target = scaled_target(target_path, parameters=0, weights="f32")
    reference = Reference(target, reference_class, folder)
    reference.drafter.target_layer_ids = [tap + 1 for tap in reference.drafter.target_layer_ids]
    tokens, cycles = next(our_cycles(target, path, prompts, EXACT))
    features = reference.features(tokens)
    assert any(list(c.proposal) != reference.proposal(features, c.anchor, c.position) for c in cycles)
