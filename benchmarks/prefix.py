"""Prompts in numbers: what injection costs a prefill, and how soon a second turn with another history begins.

`prefill`: the demo drafter on a target that costs a real one's, against the same target with nothing injected.
`turn`: a small recurrent hybrid; the second request drops the first one's answer. Against evaluating all of it again,
and, with --server, against the stock llama-server on the same pair.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from time import perf_counter, process_time

import numpy as np
from rich.console import Console
from rich.table import Table

from dflash2 import DFlashLlama, native
from dflash2.converter import Overrides, convert
from dflash2.demo import demo_pair
from dflash2.evidence import scaled_target

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from factories_targets import make_kind, random_drafter
from llama_server import LlamaServer

LEAST_PREFILL = 0.98  # of the speed without injection
MOST_TURN = 1.1  # of llama-server's time to first token
ANSWER, ADDED, BATCH = 64, 100, 512
# Where two runs are paired: (what is measured, what it is measured against, seconds of both).
Row = tuple[str, str, list[float], list[float]]


def main(argv: list[str] | None = None) -> int:
    """Measure, print the table; with --check, 1 when a bar is missed."""
    options = parse(argv)
    with tempfile.TemporaryDirectory() as folder:
        rows = [row for part in options.part for row in PARTS[part](options, Path(folder))]
    Console().print(table(rows))
    if options.json:
        options.json.write_text(json.dumps([summary(row) for row in rows], indent=2) + "\n")
    return int(options.check and any(summary(row)["missed"] for row in rows))


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=[*PARTS], nargs="+", default=[*PARTS])
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of a prompt")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall", help="cpu for a shared machine, with --threads 1"
    )
    parser.add_argument("--kind", default="qwen35", help="architecture of the hybrid")
    parser.add_argument("--server", type=Path, help="a stock llama-server; without it that row is left out")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers as JSON")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a bar is missed")
    options = parser.parse_args(argv)
    if options.server and options.clock == "cpu":
        parser.error("--server is another process: compare with it by --clock wall")
    return options


def prefill(options: argparse.Namespace, folder: Path) -> Iterator[Row]:
    """Prompt evaluation with injection and without, alternating: of the last window only, and of every position."""
    pair = demo_pair()
    target = scaled_target(pair.target, weights="f16")
    for label, overrides in {"its window": Overrides(), "everything": Overrides(sliding_window=False)}.items():
        drafter = folder / f"{label}.gguf"
        convert(pair.drafter, pair.target, drafter, overrides=overrides)
        llm = opened(target, drafter, options)
        depth, seconds = llm.depth, {True: [], False: []}
        for repeat in range(options.repeats + 1):
            tokens = prompt(repeat, options.tokens)
            for drafting in (True, False) if repeat % 2 else (False, True):
                llm.depth = depth if drafting else 0
                llm.reset()
                llm.eval(tokens[:2])  # llama.cpp plans its graphs again after a change of depth
                llm.reset()
                taken = timed(options, lambda: llm.eval(tokens))  # noqa: B023
                if repeat:  # the first round warms up
                    seconds[drafting].append(taken)
        llm.close()
        yield f"prefill injecting {label}", "prefill without", seconds[True], seconds[False]


def turn(options: argparse.Namespace, folder: Path) -> Iterator[Row]:
    """Time to first token of a second turn that leaves out the first one's answer."""
    target = make_kind(folder / "hybrid.gguf", options.kind)
    drafter = folder / "hybrid-drafter.gguf"
    convert(random_drafter(folder / "checkpoint"), target, drafter, outtype="f32")
    turns = [(first := prompt(n, options.tokens), first + prompt(n + 1000, ADDED)) for n in range(options.repeats)]
    ours = turns_of(options, opened(target, drafter, options), turns)
    again = turns_of(options, opened(target, drafter, options, ctx_checkpoints=0), turns)
    yield "second turn", "all of it again", ours, again
    if options.server:
        with LlamaServer(options.server, server_arguments(target, drafter, options), folder / "server.log") as server:
            yield "second turn", "llama-server", ours, [server_turn(server.url, *pair) for pair in turns]


def turns_of(options: argparse.Namespace, llm: DFlashLlama, turns: list[tuple[list[int], list[int]]]) -> list[float]:
    seconds = []
    for first, second in turns:
        llm.reset()
        take(llm, first, ANSWER)
        seconds.append(timed(options, lambda: take(llm, second, 1)))  # noqa: B023
    llm.close()
    return seconds


def server_turn(url: str, first: list[int], second: list[int]) -> float:
    """Seconds until the first token of `second`, after `first` was answered."""

    def post(tokens: list[int], n_predict: int) -> None:
        request = {"prompt": tokens, "n_predict": n_predict, "temperature": 0, "cache_prompt": True, "ignore_eos": True}
        body = json.dumps(request).encode()
        with urllib.request.urlopen(urllib.request.Request(url + "/completion", data=body), timeout=600) as answer:
            answer.read()

    post(first, ANSWER)
    begun = perf_counter()
    post(second, 1)
    return perf_counter() - begun


def server_arguments(target: Path, drafter: Path, options: argparse.Namespace) -> list[str]:
    return [
        *("--model", str(target), "--ctx-size", str(context(options)), "--parallel", "1", "--fit", "off"),
        *("--batch-size", str(BATCH), "--ubatch-size", str(BATCH), "--flash-attn", "on", "--cache-ram", "0"),
        *("--threads", str(options.threads), "--threads-batch", str(options.threads)),
        *("--spec-type", "draft-dflash", "--spec-draft-model", str(drafter), "--spec-draft-n-max", "7"),
        "--repack" if native.repacking_is_safe() else "--no-repack",
    ]


def opened(target: Path, drafter: Path, options: argparse.Namespace, **more: object) -> DFlashLlama:
    threads = {"n_threads": options.threads, "n_threads_batch": options.threads}
    sizes = {"n_ctx": context(options), "n_batch": BATCH, "n_ubatch": BATCH}
    return DFlashLlama(target, drafter, depth=None, auto_disable=False, verbose=False, **threads, **sizes, **more)


def context(options: argparse.Namespace) -> int:
    return options.tokens + ANSWER + ADDED + 64


def prompt(seed: int, n: int) -> list[int]:
    return np.random.default_rng(seed).integers(40, 240, n).tolist()


def take(llm: DFlashLlama, tokens: list[int], n: int) -> None:
    generator = llm.generate(tokens, temp=0.0)
    for _ in zip(range(n), generator, strict=False):
        pass
    generator.close()


def timed(options: argparse.Namespace, call: Callable[[], object]) -> float:
    clock = process_time if options.clock == "cpu" else perf_counter
    begun = clock()
    call()
    return clock() - begun


PARTS = {"prefill": prefill, "turn": turn}


def summary(row: Row) -> dict[str, object]:
    """Medians of a row, the median of its paired ratios, and whether its bar is missed."""
    what, against, ours, theirs = row
    ratio = median(their / our for our, their in zip(ours, theirs, strict=True))
    least = {"prefill without": LEAST_PREFILL, "llama-server": 1 / MOST_TURN}.get(against, 0.0)
    return {
        "what": what,
        "against": against,
        "seconds": median(ours),
        "seconds_against": median(theirs),
        "speed_ratio": ratio,
        "least": least,
        "missed": ratio < least,
    }


def table(rows: list[Row]) -> Table:
    """One line per pair: medians and the ratio of speeds."""
    shown = Table("measured", "against", "ms", "ms against", "speed", "at least")
    for row in map(summary, rows):
        shown.add_row(
            str(row["what"]),
            str(row["against"]),
            f"{1000 * row['seconds']:.1f}",
            f"{1000 * row['seconds_against']:.1f}",
            f"{row['speed_ratio']:.3f}x",
            f"{row['least']:.2f}x" if row["least"] else "",
        )
    return shown


if __name__ == "__main__":
    raise SystemExit(main())
