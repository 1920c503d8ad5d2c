"""Blocks drafted by llama.cpp beside those of the plain PyTorch drafter, along the tokens that we generated."""

from dataclasses import dataclass

import numpy as np
import torch
from factories import VOCAB, make_target
from plain_drafter import PlainDrafter
from reference_pair import load_target

from dflash2 import DFlashLlama
from dflash2.converter import convert
from dflash2.evidence import scaled_target

N_PROMPTS, PROMPT_LENGTH, N_TOKENS = 3, 60, 24
LEAST_BLOCKS = 20
GGML_TYPE_F32 = 0
# Caches in F32, and attention without the F16 tiles of llama.cpp's flash attention.
_EXACT = {"type_k": GGML_TYPE_F32, "type_v": GGML_TYPE_F32, "flash_attn": False}


@dataclass(frozen=True)
class Block:
    """One cycle of llama.cpp and what the reference proposes at the same place."""

    position: int
    ours: list[int]
    reference: list[int]


@dataclass(frozen=True)
class Target:
    """A random target: its F32 GGUF and the same weights in PyTorch."""

    path: object
    model: object

    @torch.inference_mode()
    def features(self, tokens, taps):
        """Outputs of the tapped layers, [len(tokens), K*D]; tap -1 is the embedding."""
        states = self.model(torch.tensor([tokens]), output_hidden_states=True, use_cache=False).hidden_states
        # The last entry is normed; what a drafter reads is the last layer's bare output.
        return torch.cat([states[tap + 1][0] for tap in taps], -1)

    @property
    def embeddings(self):
        """Token embeddings [V, D], which are the head too."""
        return self.model.get_input_embeddings().weight.detach()


def make_f32_target(folder, **settings):
    """A random Qwen3 target with F32 weights."""
    path = scaled_target(make_target(folder / "target.gguf", **settings), parameters=0, weights="f32")
    return Target(path, load_target(path))


def drafted_blocks(target, drafter, reference: PlainDrafter):
    """Every block drafted by the GGUF `drafter` behind random prompts, with the reference's proposal."""
    random = np.random.default_rng(7)
    blocks = []
    options = {"n_ctx": 128, "n_threads": 1, "n_threads_batch": 1, "verbose": False, **_EXACT}
    llm = DFlashLlama(target.path, drafter, depth=None, auto_disable=False, **options)
    for _ in range(N_PROMPTS):
        prompt, cycles = random.integers(2, VOCAB, PROMPT_LENGTH).tolist(), []
        llm.reset()
        llm.on_cycle = cycles.append
        stream = llm.generate(prompt, temp=0.0)
        tokens = prompt + [next(stream) for _ in range(N_TOKENS)]
        stream.close()
        blocks += [compared(target, reference, tokens, cycle) for cycle in cycles]
    llm.close()
    return blocks


def compared(target, reference, tokens, cycle):
    """A `cycle` of ours (its anchor, position and proposal) among `tokens`, beside the reference's proposal."""
    rules = reference.rules
    features = target.features(tokens[: cycle.position], rules.taps)
    table = reference.weights.get("embed_tokens.weight", target.embeddings)
    if rules.mask_embedding is not None:
        table = table.clone()
        table[rules.mask_token] = rules.mask_embedding
    rows = reference.rows(features, table[[cycle.anchor] + [rules.mask_token] * (rules.block - 1)])
    proposal = reference.propose(rows[1:], cycle.anchor, target.embeddings)
    return Block(cycle.position, list(cycle.proposal), proposal)


def assert_drafts_equal(target, folder, reference: PlainDrafter, tmp_path, *, least_equal=1.0, **options):
    """Convert the checkpoint in `folder` and compare every block; at least LEAST_BLOCKS, and that share equal."""
    output = tmp_path / "drafter.gguf"
    conversion = convert(folder, target.path, output, outtype="f32", **options)
    blocks = drafted_blocks(target, output, reference)
    assert len(blocks) >= LEAST_BLOCKS
    differing = [block for block in blocks if block.ours != block.reference]
    assert len(differing) <= (1 - least_equal) * len(blocks), differing[0]
    return conversion
