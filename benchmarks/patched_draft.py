"""The draft pass of the demo drafter in the Python runtime: patched llama.cpp against stock, in turns.

Every turn is a process with one of the two libraries. Given are milliseconds a cycle of each stage (median over the
prompts), the accepted length, graphs built on the draft context once it is warm, and plain tokens per second.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter

from rich.console import Console
from rich.table import Table

LEAST_DRAFT = 1.7  # times faster than stock
LEAST_PLAIN = 0.97  # of stock's tokens per second without drafting: no loss beyond noise
STAGES = ("inject", "draft", "select", "verify")
WARM_TOKENS = 60  # of a first prompt; every number of injected rows has had its graph then


def main(argv: list[str] | None = None) -> int:
    """Measure, print the table; with --check, 1 when a bar is missed."""
    options = parse(argv)
    if options.turn:
        print(json.dumps(turn(options)))
        return 0
    from dflash2 import patches

    patched = options.patched or patches.build(targets=("libs", "server")).libraries
    with tempfile.TemporaryDirectory() as folder:
        turns = [
            {name: run(options, library, folder) for name, library in (("stock", "stock"), ("patched", str(patched)))}
            for _ in range(options.rounds)
        ]
    shown, missed = summary(turns)
    Console().print(shown)
    if options.json:
        options.json.write_text(json.dumps({"threads": options.threads, "turns": turns}, indent=1) + "\n")
    for sentence in missed:
        print(f"missed: {sentence}", file=sys.stderr)
    return int(options.check and bool(missed))


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--patched", type=Path, help="folder of the patched library; by default it is built")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=200, help="new tokens per prompt")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers as JSON")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a bar is missed")
    parser.add_argument("--turn", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def run(options: argparse.Namespace, library: str, folder: str) -> dict[str, float]:
    """One turn with `library`: "stock", or a folder."""
    command = [sys.executable, __file__, "--turn", folder]
    for name in ("prompts", "tokens", "threads"):
        command += [f"--{name}", str(getattr(options, name))]
    environment = {**os.environ, "DFLASH2_LIBRARY": library}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def turn(options: argparse.Namespace) -> dict[str, float]:
    """What one library does, in this process."""
    from dflash2 import DFlashLlama
    from dflash2.converter import convert
    from dflash2.demo import demo_pair

    pair, drafter = demo_pair(), options.turn / "drafter.gguf"
    if not drafter.exists():
        convert(pair.drafter, pair.target, drafter)
    threads = {"n_threads": options.threads, "n_threads_batch": options.threads}
    llm = DFlashLlama(pair.target, drafter, depth=None, auto_disable=False, n_ctx=512, verbose=False, **threads)

    def generate(text: str, n: int) -> float:
        llm.reset()
        stream = llm.generate(llm.tokenize(text.encode()), temp=0.0)
        next(stream)
        begun = perf_counter()
        for _ in zip(range(n), stream, strict=False):
            pass
        stream.close()
        return n / (perf_counter() - begun)

    generate(pair.prompts[-1], WARM_TOKENS)
    built = llm._session.drafter.graphs_built
    stages, cycles, lengths = {name: [] for name in STAGES}, 0, []
    for text in pair.prompts[: options.prompts]:
        llm.reset_stats()
        generate(text, options.tokens)
        stats = llm.stats
        cycles += stats.cycles
        lengths.append(stats.accepted_length)
        for name in STAGES:
            stages[name].append(1e3 * stats.seconds[name] / stats.cycles)
    rebuilt = llm._session.drafter.graphs_built
    llm.depth = 0
    plain = [generate(text, options.tokens) for text in pair.prompts[: options.prompts]]
    counted = {} if built is None or rebuilt is None else {"rebuilds_per_cycle": (rebuilt - built) / cycles}
    measured = {name: median(each) for name, each in stages.items()}
    return {**measured, "accepted_length": sum(lengths) / len(lengths), "plain": median(plain), **counted}


def summary(turns: list[dict[str, dict[str, float]]]) -> tuple[Table, list[str]]:
    """The table, and a sentence for every bar that is missed."""
    table, missed = Table("", "stock", "patched", "stock / patched", "bar"), []
    for name in (*STAGES, "accepted_length", "plain"):
        stock, patched = (median(each[side][name] for each in turns) for side in ("stock", "patched"))
        ratio = median(each["stock"][name] / each["patched"][name] for each in turns)
        bar = {"draft": f"{LEAST_DRAFT}x", "plain": f"at most {1 / LEAST_PLAIN:.2f}x"}.get(name, "")
        table.add_row(name, f"{stock:.3f}", f"{patched:.3f}", f"{ratio:.2f}x", bar)
        if name == "draft" and ratio < LEAST_DRAFT:
            missed.append(f"the draft pass is {ratio:.2f}x faster, needed {LEAST_DRAFT}x")
        if name == "plain" and ratio > 1 / LEAST_PLAIN:
            missed.append(f"without drafting the patched library has {1 / ratio:.2f} of stock's tokens per second")
    rebuilds = median(each["patched"].get("rebuilds_per_cycle", float("inf")) for each in turns)
    table.add_row("graphs built per cycle", "", f"{rebuilds:.3f}", "", "0, steps of n_kv aside")
    if rebuilds > 0.05:  # a prompt of 200 tokens crosses one step of 256 cells in about 55 cycles
        missed.append(f"{rebuilds:.3f} graphs are built per cycle on the draft context")
    return table, missed


if __name__ == "__main__":
    sys.exit(main())
