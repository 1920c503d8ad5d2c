"""Patched llama.cpp against stock, paired in one run: operator timings at the published 27B geometry.

    python benchmarks/patches.py [--stock DIR] [--patched DIR] [--threads 1] [--rounds 5] [--json FILE] [--check]

DIR holds `libggml*.so`; without it the builds that `dflash2 build` made are used. Stock and patched take turns, and
every figure is the median of the rounds' medians. `--check` fails if a figure misses its bar or a kernel did not run.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from dflash2 import patches

HERE = Path(__file__).parent
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


def compile_timer(folder: Path, library: Path) -> Path:
    """The program that times one build; the same binary runs with either build's libraries."""
    program = folder / "patches_ops"
    command = ["g++", "-std=c++17", "-O2", f"-I{patches.source() / 'ggml' / 'include'}", str(HERE / "patches_ops.cpp")]
    command += ["-o", str(program), f"-L{library}", "-lggml", "-lggml-cpu", "-lggml-base", "-ldl"]
    subprocess.run(command, check=True)
    return program


def time_build(program: Path, library: Path, graph: str, threads: int, repeats: int) -> dict[str, float]:
    environment = {**os.environ, "LD_LIBRARY_PATH": str(library)}
    done = subprocess.run(
        [program, graph, str(threads), str(repeats)], env=environment, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def operator_rows(stock: Path, patched: Path, threads: int, rounds: int, repeats: int) -> list[Row]:
    """Stock's graph on stock's library beside the lean graph on the patched one."""
    with tempfile.TemporaryDirectory() as folder:
        program = compile_timer(Path(folder), patched)
        pairs = [
            (
                time_build(program, stock, "stock", threads, repeats),
                time_build(program, patched, "lean", threads, repeats),
            )
            for _ in range(rounds)
        ]
    return [
        Row(
            title,
            statistics.median(a[name] for a, _ in pairs),
            statistics.median(b[name] for _, b in pairs),
            bar,
            int(min(b[f"{name}_runs"] for _, b in pairs)),
        )
        for name, (title, bar) in OPERATORS.items()
    ]


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

    rows = operator_rows(
        library_folder(given.stock, stock=True),
        library_folder(given.patched, stock=False),
        given.threads,
        given.rounds,
        given.repeats,
    )
    show(rows, given.threads)
    if given.json:
        rendered = [{**asdict(r), "ratio": r.ratio, "passed": r.passed} for r in rows]
        given.json.write_text(json.dumps({"threads": given.threads, "operators": rendered}, indent=2) + "\n")
    return int(given.check and not all(r.passed for r in rows))


if __name__ == "__main__":
    sys.exit(main())
