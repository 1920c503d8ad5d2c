"""A real model with a random drafter, over a patched library: greedy output is that without a drafter."""

import pytest
from factories import drafter_config, drafter_tensors, write_checkpoint
from patched_library import run_patched
from real_model import fetch_gemma3

from dflash2.converter import convert
from dflash2.gguf_info import read_gguf_info

N_TOKENS = 24
PROMPTS = [
    "The capital of France is",
    "Once upon a time there was a",
    "def fibonacci(n):\n    ",
    "Water boils at",
    "The three primary colours are",
    "Dear Sir or Madam,\n",
    "In 1969, the first",
    "A recipe for pancakes:\n1.",
    "Der schnelle braune Fuchs",
    "La révolution française commence en",
    "import numpy as np\n\n",
    "Q: What is seven times eight?\nA:",
    "The mitochondrion is",
    "Roses are red,\n",
    "SELECT name FROM users WHERE",
    "The opposite of hot is",
    "To be, or not to be,",
    "| city | country |\n|---|---|\n| Rome |",
    "1, 1, 2, 3, 5, 8,",
    "The weather tomorrow will be",
]


@pytest.fixture(scope="module")
def result(patched, tmp_path_factory):
    scratch = tmp_path_factory.mktemp("real")
    target = fetch_gemma3(scratch)
    info = read_gguf_info(target)
    settings = drafter_config(
        hidden_size=info.integer("gemma3.embedding_length"),
        vocab_size=len(info.metadata["tokenizer.ggml.tokens"]),
        num_target_layers=info.integer("gemma3.block_count"),
        max_position_embeddings=2048,
        block_size=8,
        dflash_config={"block_size": 8, "mask_token_id": 4, "target_layer_ids": [1, 8, 15]},
    )
    checkpoint = write_checkpoint(scratch / "random", settings, drafter_tensors(settings, 5), dtype="F32")
    drafter = scratch / "drafter.gguf"
    convert(checkpoint, target, drafter, outtype="q8_0")
    job = {"target": str(target), "drafter": str(drafter), "prompts": PROMPTS, "n_tokens": N_TOKENS, "options": {}}
    return run_patched(patched.libraries, scratch, {"gemma3": job})["gemma3"]


@pytest.mark.parametrize("index", range(len(PROMPTS)))
def test_greedy_tokens_of_gemma3_are_those_without_a_drafter(result, index):
    assert result["drafted"][index] == result["plain"][index]
    assert 0 < len(result["plain"][index]) <= N_TOKENS


def test_drafts_were_made_and_verified(result):
    assert result["patched"]
    assert result["proposed"] > 10 * len(PROMPTS)
    assert result["accepted"] < result["proposed"]
