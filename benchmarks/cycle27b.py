"""What a cycle of the 27B pair costs on the card at hand, stock llama.cpp and patched in one run.

Random weights of the pair's exact geometry (pair27b.py, made on the first run: 18 GB on disk), whose drafts are
accepted by dice (`--spec-synth-len`): every draft with the same probability, the one that gives `--accepted-length` at
the widest block, so that both sides accept alike and a narrower block accepts what it can. Two numbers stay apart:
L, the accepted length, and c(w), the time of a cycle of width w over the time of a token without drafting by the same
build; tokens/s is their quotient, and a ratio of cycle times is a ratio of tokens/s at equal L.

    python benchmarks/cycle27b.py --json FILE --check                     about half an hour on a card of that class
    python benchmarks/cycle27b.py --backend cpu --layers 4 --width 512 --vocabulary 4096 --depths 64 --tokens 32

The bars hold for the widest block at the first depth with the first cache type.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np
from backend_counts import Counter, Counts, counting
from demo_pair import processor
from operator_times import Operators, operators
from pair27b import BLOCK, Geometry, random_pair
from rich.console import Console
from rich.table import Table

from dflash2.patches import build

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from llama_server import LlamaServer

MOST_C8 = 1.6  # on an H200
LEAST_GAIN = 1.25  # tokens/s against stock at equal L
MOST_SHARE = 0.013  # of a cycle, for the convolutions and the selector
LEAST_TOP_K = 5.0  # times as fast as stock
SIDES = ("stock", "patched")
FIRST_TOKEN = 2  # ids below it are special
START_SECONDS = 900  # for 17 GB from a slow disk


@dataclass(frozen=True)
class Run:
    """One answer after its first token: tokens, cycles, milliseconds, and what the backends were asked for."""

    tokens: int
    cycles: int
    ms: float
    counts: Counts


@dataclass(frozen=True)
class Cost:
    """Medians over the runs of one build at one setting; counts are per cycle, and None where nothing counted them."""

    cycle_ms: float
    accepted_length: float
    graphs: float | None
    launches: float | None
    kernels: float | None
    host_us: float | None

    @classmethod
    def of(cls, runs: Sequence[Run]) -> Cost:
        def per_cycle(name: str) -> float | None:
            values = [getattr(run.counts, name) for run in runs]
            return None if None in values else median(v / run.cycles for v, run in zip(values, runs, strict=True))

        waits = [run.counts.wait_ms for run in runs]
        host = None
        if None not in waits:
            host = median(1e3 * (run.ms - wait) / run.cycles for run, wait in zip(runs, waits, strict=True))
        return cls(
            cycle_ms=median(run.ms / run.cycles for run in runs),
            accepted_length=median(run.tokens / run.cycles for run in runs),
            graphs=per_cycle("graphs"),
            launches=per_cycle("cuda_graphs"),
            kernels=per_cycle("cuda_kernels"),
            host_us=host,
        )

    @property
    def tokens_per_second(self) -> float:
        return 1e3 * self.accepted_length / self.cycle_ms


@dataclass(frozen=True)
class Row:
    """Both builds at one setting; `*_token_ms` is the time of a token of that build without drafting."""

    cache_type: str
    depth: int
    width: int
    stock: Cost
    patched: Cost
    stock_token_ms: float
    patched_token_ms: float

    @property
    def cost_stock(self) -> float:
        """c(w) of the stock build."""
        return self.stock.cycle_ms / self.stock_token_ms

    @property
    def cost_patched(self) -> float:
        """c(w) of the patched build."""
        return self.patched.cycle_ms / self.patched_token_ms

    @property
    def gain(self) -> float:
        """Tokens/s of the patched build over those of the stock one at equal L."""
        return self.stock.cycle_ms / self.patched.cycle_ms

    def rendered(self) -> dict:
        derived = {"cost_stock": self.cost_stock, "cost_patched": self.cost_patched, "gain": self.gain}
        speeds = {f"{side}_tokens_per_second": getattr(self, side).tokens_per_second for side in SIDES}
        return {**asdict(self), **derived, **speeds}


@dataclass(frozen=True)
class Bar:
    """What is asked of one number; not `asked` where the card or the part run says nothing about it."""

    what: str
    value: float
    limit: float
    at_most: bool = False
    asked: bool = True

    @property
    def missed(self) -> bool:
        return self.asked and (self.value > self.limit if self.at_most else self.value < self.limit)


def acceptance(length: float, width: int) -> float:
    """Probability of a draft whose block of `width` tokens is accepted to `length` on average."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if accepted_length(middle, width) < length else (low, middle)
    return (low + high) / 2


def accepted_length(probability: float, width: int) -> float:
    """Mean tokens of a cycle whose drafts are accepted with `probability` each, up to the first that is not."""
    return sum(probability**i for i in range(width))


def arguments(options: Namespace, pair: tuple[Path, Path], width: int, cache_type: str) -> list[str]:
    """Options of llama-server for verifying `width` tokens at once; for width 1, without a drafter."""
    context = -(-(max(options.depths) + options.tokens + 2 * BLOCK) // 256) * 256
    given = [
        *("--model", str(pair[0]), "--ctx-size", str(context), "--parallel", "1", "--no-kv-unified", "--fit", "off"),
        *("--flash-attn", "on", "--cache-type-k", cache_type, "--cache-type-v", cache_type),
        *("--gpu-layers", "all", "--spec-draft-ngl", "all", "--cache-ram", "0", "--ctx-checkpoints", "0"),
        *("--threads", str(options.threads), "--threads-batch", str(options.threads)),
    ]
    if width == 1:
        return given
    length = accepted_length(acceptance(options.accepted_length, max(options.widths)), width)
    drafts = ["--spec-type", "draft-dflash", "--spec-draft-model", str(pair[1]), "--spec-draft-n-max", str(width - 1)]
    return [*given, *drafts, "--spec-synth-len", f"{length:.6f}"]


def answered(server: LlamaServer, prompt: list[int], tokens: int, seed: int, counter: Counter) -> Run:
    """One answer, greedy, its drafts accepted by the dice of `seed`."""
    request = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "seed": seed, "cache_prompt": False}
    marks = []
    for event in server.stream("/completion", {**request, "stream": True, "timings_per_token": True}):
        if not marks:
            marks.append((event["timings"], counter.read()))
        last = event["timings"]
    marks.append((last, counter.read()))
    (begin, before), (end, after) = marks
    made, accepted = (end[key] - begin.get(key, 0) if key in end else 0 for key in ("predicted_n", "draft_n_accepted"))
    return Run(made, made - accepted, end["predicted_ms"] - begin["predicted_ms"], counter.between(before, after))


def measured(options: Namespace, pair: tuple[Path, Path], side: str, width: int, cache_type: str) -> dict[int, Cost]:
    """Costs by depth of one build, from one server."""
    random = np.random.default_rng(0)
    given = arguments(options, pair, width, cache_type)
    prompts = [random.integers(FIRST_TOKEN, options.vocabulary, depth).tolist() for depth in options.depths]
    costs = {}
    with (
        tempfile.TemporaryDirectory() as name,
        counting(Path(name), options.backend) as counter,
        LlamaServer(getattr(options, side), given, Path(name) / "log", counter.environment, START_SECONDS) as server,
    ):
        answered(server, min(prompts, key=len)[:64], min(options.tokens, 64), 0, counter)  # warms up
        for depth, prompt in zip(options.depths, prompts, strict=True):
            runs = [answered(server, prompt, options.tokens, 1 + n, counter) for n in range(options.repeats)]
            costs[depth] = Cost.of(runs)
    return costs


def cycles(options: Namespace, pair: tuple[Path, Path]) -> Iterator[list[Row]]:
    """The rows of one width after another, in all depths; stock and patched take turns, server by server."""
    for cache_type in options.cache_types:
        alone: dict[str, dict[int, Cost]] = {}
        for width in sorted({1, *options.widths}):
            costs = {side: measured(options, pair, side, width, cache_type) for side in SIDES}
            alone = alone or costs
            yield [
                Row(
                    cache_type,
                    depth,
                    width,
                    *(costs[side][depth] for side in SIDES),
                    *(alone[side][depth].cycle_ms for side in SIDES),
                )
                for depth in options.depths
            ]


def bars(rows: Sequence[Row], times: Operators | None, card: str, backend: str) -> list[Bar]:
    """What the issue asks, of the widest block in the first depth with the first cache type; of GPUs only."""
    first = [row for row in rows if (row.depth, row.cache_type) == (rows[0].depth, rows[0].cache_type)]
    widest = max(first, key=lambda row: row.width)
    gpu = backend != "cpu"
    asked = [
        Bar(f"c({widest.width}), patched", widest.cost_patched, MOST_C8, True, gpu and "H200" in card),
        Bar(f"tokens/s against stock at equal L, width {widest.width}", widest.gain, LEAST_GAIN, asked=gpu),
    ]
    if times is not None:
        share = times.patched_us / (1e3 * widest.patched.cycle_ms)
        asked.append(Bar("convolutions and selector, share of a cycle", share, MOST_SHARE, True, gpu))
        asked.append(Bar("top-k against stock", times.top_k_gain, LEAST_TOP_K, asked=gpu))
        asked.append(Bar("runs of every fused kernel", times.kernel_runs, 1, asked=backend in ("cpu", "cuda")))
    return asked


def card_of(program: Path) -> str:
    """The first GPU as the build names it, else the processor."""
    listed = subprocess.run([program, "--list-devices"], capture_output=True, text=True, check=True).stdout
    devices = [line.strip() for line in listed.splitlines() if line.startswith("  ") and ":" in line]
    return devices[0] if devices else processor()


def main(argv: list[str] | None = None) -> int:
    """Measure, print the tables; with --check, 1 when a bar is missed."""
    options = parse(argv)
    console = Console(width=170)
    card = card_of(options.patched)
    pair = random_pair(geometry(options), options.folder)
    folders = [getattr(options, side).parent for side in SIDES]
    times = None if options.no_operators else operators(*folders, options.backend, threads=options.threads)
    rows: list[Row] = []
    for more in cycles(options, pair):
        rows += more
        Console(stderr=True).print(f"{more[0].cache_type}, width {more[0].width}: measured")
        asked = bars(rows, times, card, options.backend)
        if options.json:  # after every width: a run that is cut short leaves what it has
            options.json.write_text(json.dumps(rendered(options, card, rows, times, asked), indent=2) + "\n")
    console.print(cycle_table(rows, card))
    if times is not None:
        console.print(times.table())
    console.print(bar_table(asked))
    return int(options.check and any(bar.missed for bar in asked))


def rendered(options: Namespace, card: str, rows: Sequence[Row], times: Operators | None, asked: Sequence[Bar]) -> dict:
    machine = {"card": card, "system": platform.platform(), "threads": options.threads, "backend": options.backend}
    return {
        "machine": machine,
        "geometry": asdict(geometry(options)),
        "accepted_length": options.accepted_length,
        "tokens": options.tokens,
        "repeats": options.repeats,
        "rows": [row.rendered() for row in rows],
        "operators": None if times is None else times.rendered(),
        "bars": [{**asdict(bar), "missed": bar.missed} for bar in asked],
    }


def geometry(options: Namespace) -> Geometry:
    full = Geometry()
    sizes = (options.layers, options.width, options.vocabulary)
    return full if sizes == (full.layers, full.width, full.vocabulary) else Geometry.scaled(*sizes)


def parse(argv: list[str] | None) -> Namespace:
    full = Geometry()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, shown = parser.add_argument, "(default: %(default)s)"
    add("--backend", default="cuda", choices=("cpu", "cuda", "hip", "vulkan", "metal"), help=shown)
    add("--stock", type=Path, help="the stock llama-server (default: built from the pin)")
    add("--patched", type=Path, help="the patched one (default: built from the pin)")
    add("--layers", type=int, default=full.layers, help=f"of the target {shown}")
    add("--width", type=int, default=full.width, help=f"hidden size {shown}")
    add("--vocabulary", type=int, default=full.vocabulary, help=f"tokens {shown}")
    add("--folder", type=Path, help="where the models are kept (default: the cache)")
    add("--widths", type=numbers, default="1,2,3,4,5,6,7,8", help=f"of verification {shown}")
    add("--depths", type=numbers, default="1024,32768,65536", help=f"tokens before the answer {shown}")
    add("--cache-types", type=lambda text: text.split(","), default="f16,q8_0", help=f"of the target's KV {shown}")
    add("--accepted-length", type=float, default=5.0, help=f"L at the widest block {shown}")
    add("--tokens", type=int, default=256, help=f"per answer {shown}")
    add("--repeats", type=int, default=1, help=f"answers per setting {shown}")
    add("--threads", type=int, default=os.cpu_count() or 1, help=shown)
    add("--no-operators", action="store_true", help="leave out the operator timings, which need a compiler")
    add("--json", type=Path, metavar="FILE", help="also write the numbers as JSON, after every width")
    add("--check", action="store_true", help="exit with 1 when a bar is missed")
    options = parser.parse_args(argv)
    if not set(options.widths) <= set(range(1, BLOCK + 1)):
        parser.error(f"--widths: numbers from 1 to {BLOCK}")
    if not 1 <= options.accepted_length <= max(options.widths):
        parser.error("--accepted-length must be between 1 and the widest block")
    for side in SIDES:
        if getattr(options, side) is None:
            setattr(options, side, build(stock=side == "stock", backend=options.backend).server)
    return options


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def cycle_table(rows: Sequence[Row], card: str) -> Table:
    shown = Table("KV", "depth", "width", "L", title=f"{card}: stock / patched")
    for heading in ("ms a cycle", "c(w)", "tokens/s", "gain", "graphs", "CUDA graphs", "kernels", "host us a cycle"):
        shown.add_column(heading, justify="right")
    for row in rows:
        pair = (row.stock, row.patched)
        shown.add_row(
            row.cache_type,
            str(row.depth),
            str(row.width),
            f"{row.patched.accepted_length:.2f}",
            both([cost.cycle_ms for cost in pair], 2),
            both([row.cost_stock, row.cost_patched], 2),
            both([cost.tokens_per_second for cost in pair], 1),
            f"{row.gain:.2f}x",
            both([cost.graphs for cost in pair], 1),
            both([cost.launches for cost in pair], 1),
            both([cost.kernels for cost in pair], 0),
            both([cost.host_us for cost in pair], 0),
        )
    return shown


def both(values: Sequence[float | None], digits: int) -> str:
    return " / ".join("-" if value is None else f"{value:.{digits}f}" for value in values)


def bar_table(asked: Sequence[Bar]) -> Table:
    shown = Table("asked", "value", "bar", "")
    for bar in asked:
        verdict = "not asked of this card" if not bar.asked else "missed" if bar.missed else "ok"
        shown.add_row(bar.what, f"{bar.value:.3f}", f"{'at most' if bar.at_most else 'at least'} {bar.limit}", verdict)
    return shown


if __name__ == "__main__":
    raise SystemExit(main())
