"""Train the demo pair: a qwen3 target, a DFlash 2 drafter and a v1 drafter, on the standard library of this Python.

    python examples/demo_pair/train.py --work WORK --output OUT

needs the extra `reference` (torch, tokenizers). Seeded; every stage is kept in WORK, so an interrupted run goes on
where it stopped. Run it alone: a second CPU-bound job slows it many times over.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from corpus import (
    SourceFile,
    cut_prompts,
    distinct_4grams,
    encode_files,
    end_of_text_before_loop,
    read_corpus,
    train_tokenizer,
)
from drafter import Drafter, DrafterData, DrafterShape, accepted_lengths, tap_target, train_drafter
from export import round_to_q8_0, write_drafter, write_target
from llama_cpp import Llama
from target import Phase, Target, TransformerShape, continue_prompts, own_continuations, train_target
from tokenizers import Tokenizer


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the result, apart from the text."""

    seed: int = 0
    target: TransformerShape = TransformerShape()
    target_phases: tuple[Phase, ...] = (Phase(700, 40, 256), Phase(110, 20, 512))
    drafter: DrafterShape = DrafterShape(TransformerShape(layers=2))
    continuation_batches: int = 20
    continuation_batch: int = 384
    continuation_tokens: int = 256
    # Greedy decoding is what the pair is measured at; the others keep sampled text from being foreign.
    temperatures: tuple[float, ...] = (0.0, 0.0, 0.3, 0.5, 0.7, 1.0)
    # Windows of the corpus itself, which sampling cannot make fast enough.
    corpus_rows: int = 4096
    drafter_steps: int = 2200
    drafter_batch: int = 16
    prompts: int = 48
    prompt_tokens: tuple[int, int] = (24, 96)
    new_tokens: int = 200
    least_distinct: float = 0.6


# Folder of the output, and whether it is a DFlash 2 drafter.
DRAFTERS = {"v2": ("drafter", True), "v1": ("drafter-v1", False)}
SMOKE = Recipe(
    target_phases=(Phase(2, 4, 64),),
    continuation_batches=2,
    continuation_batch=64,
    continuation_tokens=128,
    drafter_steps=2,
    drafter_batch=2,
    corpus_rows=8,
    prompts=2,
    new_tokens=24,
    least_distinct=0.0,
)


def log(message: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {message}", flush=True)


def load_or_train_tokenizer(work: Path, files: list[SourceFile], vocab_size: int) -> Tokenizer:
    path = work / "tokenizer.json"
    if not path.exists():
        train_tokenizer(files, vocab_size).save(str(path))
    return Tokenizer.from_file(str(path))


def load_or_train_target(work: Path, recipe: Recipe, tokens: np.ndarray) -> Target:
    path = work / "target.pt"
    if not path.exists():
        model = train_target(recipe.target, tokens, recipe.target_phases, recipe.seed, log)
        torch.save(model.state_dict(), path)
    return load_target(work, recipe)


def load_target(work: Path, recipe: Recipe) -> Target:
    model = Target(recipe.target)
    model.load_state_dict(torch.load(work / "target.pt", weights_only=True))
    round_to_q8_0(model)
    return model.eval()


def sample_part(work: Path, recipe: Recipe, tokens: np.ndarray, part: int) -> tuple[np.ndarray, np.ndarray]:
    """One batch of continuations, on one thread of a process of its own."""
    torch.set_num_threads(1)
    return own_continuations(
        load_target(work, recipe),
        tokens,
        recipe.continuation_batch,
        recipe.continuation_tokens,
        recipe.prompt_tokens,
        recipe.temperatures,
        recipe.seed + 100 + part,
    )


def load_or_sample_continuations(work: Path, recipe: Recipe, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    path = work / "continuations.npz"
    if not path.exists():
        # Steps of one token are too short to share among threads.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
            parts = []
            for part in pool.map(partial(sample_part, work, recipe, tokens), range(recipe.continuation_batches)):
                parts.append(part)
                log(f"continuations: batch {len(parts)} of {recipe.continuation_batches}")
        np.savez(path, rows=np.concatenate([p[0] for p in parts]), lengths=np.concatenate([p[1] for p in parts]))
    stored = np.load(path)
    return stored["rows"], stored["lengths"]


def drafter_data(work: Path, recipe: Recipe, target: Target, tokens: np.ndarray) -> DrafterData:
    """The target's own continuations, each up to where it loops, and windows of the corpus."""
    rows, lengths = load_or_sample_continuations(work, recipe, tokens)
    ends = [end_of_text_before_loop(row.tolist(), int(n)) for row, n in zip(rows, lengths, strict=True)]
    spans = np.stack([lengths, ends], -1)
    size = recipe.continuation_tokens
    starts = np.random.default_rng(recipe.seed + 2).integers(0, len(tokens) - size, recipe.corpus_rows)
    corpus = np.stack([tokens[start : start + size] for start in starts]).astype(np.int16)
    rows = np.concatenate([rows, corpus])
    spans = np.concatenate([spans, np.tile([0, size], (len(corpus), 1))])
    log(f"{len(rows)} rows, {np.diff(spans).sum():,} tokens to draft")
    return DrafterData(rows, spans, tap_target(target, recipe.drafter.target_layer_ids, rows))


def load_or_choose_prompts(
    path: Path, recipe: Recipe, target: Path, tokenizer: Tokenizer, files: list[SourceFile]
) -> list[dict[str, str]]:
    """Take held-out prompts whose greedy continuation does not loop, as llama.cpp itself continues them."""
    if not path.exists():
        llm = Llama(str(target), n_ctx=512, verbose=False)
        prompts: list[dict[str, str]] = []
        tried = 0
        candidates = cut_prompts(tokenizer, files, recipe.prompt_tokens, recipe.seed + 2)
        while len(prompts) < recipe.prompts:
            prompt = next(candidates)
            tried += 1
            ids = llm.tokenize(prompt["prompt"].encode(), add_bos=False)
            llm.reset()
            continuation = [t for t, _ in zip(llm.generate(ids, temp=0), range(recipe.new_tokens), strict=False)]
            if distinct_4grams(continuation) >= recipe.least_distinct:
                prompts.append(prompt)
        log(f"{len(prompts)} of {tried} held-out prompts are continued without a loop")
        path.write_text(json.dumps(prompts, indent=1) + "\n", encoding="utf-8")
    return list(json.loads(path.read_text(encoding="utf-8")))


def measure(
    recipe: Recipe, target: Target, drafters: dict[str, Drafter], tokenizer: Tokenizer, prompts: list[dict[str, str]]
) -> None:
    """Log the accepted length of each drafter at T=0 (a preview; benchmarks/demo_pair.py measures in llama.cpp)."""
    totals = {name: [0, 0] for name in drafters}
    for prompt in prompts:
        ids = torch.tensor([tokenizer.encode(prompt["prompt"]).ids])
        row = continue_prompts(target, ids, recipe.new_tokens, torch.zeros(1), torch.Generator())[0]
        for name, drafter in drafters.items():
            cycles, emitted = accepted_lengths(drafter, target, row, ids.shape[1])
            totals[name][0] += cycles
            totals[name][1] += emitted
    for name, (cycles, emitted) in totals.items():
        log(f"accepted length of {name}: {emitted / cycles:.3f}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, help="folder of intermediate results")
    parser.add_argument("--output", type=Path, required=True, help="folder of the finished pair")
    parser.add_argument("--drafters", nargs="+", choices=DRAFTERS, default=list(DRAFTERS), help="default: both")
    parser.add_argument(
        "--smoke", action="store_true", help="a few steps of everything: checks the script, not the pair"
    )
    options = parser.parse_args(argv)
    recipe = SMOKE if options.smoke else Recipe()
    options.work.mkdir(parents=True, exist_ok=True)
    options.output.mkdir(parents=True, exist_ok=True)
    log(json.dumps(asdict(recipe)))

    files = read_corpus()
    tokenizer = load_or_train_tokenizer(options.work, files, recipe.target.vocab_size)
    tokens = encode_files(tokenizer, [f for f in files if not f.held_out])
    log(f"{len(files)} files, {len(tokens):,} training tokens")

    target = load_or_train_target(options.work, recipe, tokens)
    target_path = options.output / "target-q8_0.gguf"
    write_target(target, tokenizer, target_path)
    prompts = load_or_choose_prompts(options.work / "prompts.json", recipe, target_path, tokenizer, files)
    shutil.copy(options.work / "prompts.json", options.output)
    data = drafter_data(options.work, recipe, target, tokens)
    drafters = {}
    for name in options.drafters:
        folder, is_v2 = DRAFTERS[name]
        shape = replace(recipe.drafter, is_v2=is_v2)
        drafters[name] = train_drafter(
            shape, target, data, recipe.drafter_steps, recipe.drafter_batch, recipe.seed + 3, log
        )
        write_drafter(drafters[name], recipe.target, options.output / folder)
    measure(recipe, target, drafters, tokenizer, prompts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
