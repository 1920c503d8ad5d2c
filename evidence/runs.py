"""Greedy runs of one pair with and without drafting, on the same object, so that nothing else differs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from dflash2.runtime import Depth, DFlashLlama, DraftStats


@dataclass(frozen=True)
class Run:
    """`tokens` generated after one prompt, and `seconds` from the first of them to the last (prefill left out)."""

    tokens: tuple[int, ...]
    seconds: float
    stats: DraftStats


@contextmanager
def opened(target: Path, drafter: Path, llama_kwargs: dict[str, Any]) -> Iterator[DFlashLlama]:
    """The pair, closed at the end; drafting stays on however badly it does, since that is what is asked about."""
    llm = DFlashLlama(target, drafter, auto_disable=False, **{"verbose": False, "depth": None, **llama_kwargs})
    try:
        yield llm
    finally:
        llm.close()


def prompt_tokens(llm: DFlashLlama, prompts: Sequence[str]) -> list[list[int]]:
    """Token ids of each prompt, BOS included where the vocabulary asks for it."""
    return [llm.tokenize(prompt.encode()) for prompt in prompts]


def greedy_run(llm: DFlashLlama, prompt: Sequence[int], n_tokens: int, depth: Depth) -> Run:
    """Generate `n_tokens` greedily from an empty memory, with `depth` draft tokens per cycle (0: no drafting)."""
    llm.reset()
    llm.depth = depth
    llm.reset_stats()
    stream = llm.generate(prompt, temp=0.0)
    tokens = [next(stream)]
    begin = perf_counter()
    while len(tokens) < n_tokens:
        tokens.append(next(stream))
    seconds = perf_counter() - begin
    stream.close()
    return Run(tuple(tokens), seconds, llm.stats)
