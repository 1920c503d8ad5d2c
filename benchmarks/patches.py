"""Patched llama.cpp against stock, paired in one run: operator timings at the published 27B geometry.

    python benchmarks/patches.py [--stock DIR] [--patched DIR] [--threads 1] [--rounds 5] [--json FILE] [--check]

DIR holds `libggml*.so`; without it the builds that `dflash2 build` made are used. Stock and patched take turns, and
every figure is the median of the rounds' medians. `--check` fails if a figure misses its bar or a kernel did not run.
"""

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from operator_times import Operators, operators
from rich.console import Console
from rich.table import Table

from dflash2 import patches

# What one draft pass of Qwen3.8-27B-DFlash2 needs, and how many times faster than stock it has to be.
OPERATORS = {
    "conv": ("convolution, 5120 x 8, 2 taps, groups of 16", 40.0),
    "top_k": ("TOP_K 16 of 248320 x 8", 4.0),
}


@dataclass(frozen=True)
class Row:
    """One line of the table: microseconds (median), how many times faster, and the least that counts as enough."""

    name: str
    stock_us: float
    patched_us: float
    bar: float
    runs: int

    @property
    def ratio(self) -> float:
        return self.stock_us / self.patched_us

    @property
    def passed(self) -> bool:
        return self.ratio >= self.bar and self.runs > 0


def rows_of(measured: Operators) -> list[Row]:
    """Stock's graph on stock's library beside the lean graph on the patched one."""
    times = {
        "conv": (measured.stock_conv, measured.patched_conv),
        "top_k": (measured.stock_top_k, measured.patched_top_k),
    }
    return [Row(title, *times[name], bar, measured.kernel_runs) for name, (title, bar) in OPERATORS.items()]


def show(rows: list[Row], threads: int) -> None:
    table = Table(title=f"CPU, {threads} thread(s), microseconds per op, median")
    for heading in ("operator", "stock", "patched", "faster", "at least", "kernel runs"):
        table.add_column(heading, justify="left" if heading == "operator" else "right")
    for r in rows:
        table.add_row(
            r.name, f"{r.stock_us:.1f}", f"{r.patched_us:.1f}", f"{r.ratio:.1f}x", f"{r.bar:.0f}x", str(r.runs)
        )
    Console().print(table)


def library_folder(given: Path | None, *, stock: bool) -> Path:
    """The folder of a build's `libggml*.so`."""
    if given is not None:
        return given
    return patches.build(stock=stock, targets=("libs",)).libraries


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stock", type=Path)
    parser.add_argument("--patched", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=30, help="runs of every graph in a round")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()

    rows = rows_of(
        operators(
            library_folder(given.stock, stock=True),
            library_folder(given.patched, stock=False),
            "cpu",
            threads=given.threads,
            rounds=given.rounds,
            repeats=given.repeats,
        )
    )
    show(rows, given.threads)
    if given.json:
        rendered = [{**asdict(r), "ratio": r.ratio, "passed": r.passed} for r in rows]
        given.json.write_text(json.dumps({"threads": given.threads, "operators": rendered}, indent=2) + "\n")
    return int(given.check and not all(r.passed for r in rows))


if __name__ == "__main__":
    sys.exit(main())
