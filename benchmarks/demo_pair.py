"""The demo pair in numbers: accepted length of both drafters, and the speedup on a target that costs a real one's.

Every row pairs drafting with no drafting on the same object, prompt by prompt, in alternating order.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from gguf.constants import GGMLQuantizationType
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from dflash2 import native
from dflash2.converter import convert
from dflash2.demo import demo_pair
from dflash2.evidence import Bench, bench, scaled_target

LEAST_ACCEPTED_LENGTH = 3.5  # v2, continuations that do not loop
LEAST_GAIN_OVER_V1 = 1.10
LEAST_SPEEDUP = 1.8  # v2 on the F16 cost-scaled target


def main(argv: list[str] | None = None) -> int:
    """Measure, print the table; with --check, 1 when a bar is missed."""
    options = parse(argv)
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        benches = dict(measure(options, Path(folder), console))
    console.print(table(benches))
    for text in (bars := missed(benches)):
        console.print(f"missed: {text}")
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(options), "rows": rows(benches)}, indent=2) + "\n")
    return int(options.check and bool(bars))


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=None, help="prompts for the accepted length (default: all)")
    parser.add_argument("--scaled-prompts", type=int, default=10, help="prompts for the cost-scaled targets")
    parser.add_argument("--tokens", type=int, default=200, help="new tokens per prompt")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers as JSON")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a bar is missed")
    return parser.parse_args(argv)


def measure(options: argparse.Namespace, folder: Path, console: Console) -> Iterator[tuple[tuple[str, str], Bench]]:
    """((target, drafter), result) of every row."""
    pair = demo_pair()
    drafters = {}
    for name, checkpoint in (("v2", pair.drafter), ("v1", pair.drafter_v1)):
        drafters[name] = folder / f"{name}.gguf"
        convert(checkpoint, pair.target, drafters[name])
    few = slice(options.scaled_prompts)
    cases = [
        ("demo Q8_0", pair.target, "v2", slice(options.prompts)),
        ("demo Q8_0", pair.target, "v1", slice(options.prompts)),
        ("cost-scaled F16", scaled_target(pair.target, weights="f16"), "v2", few),
        ("cost-scaled F16", scaled_target(pair.target, weights="f16"), "v1", few),
        ("cost-scaled Q8_0", scaled_target(pair.target, weights="q8_0"), "v2", few),
    ]
    with Progress(console=console, transient=True) as progress:
        for label, target, drafter, chosen in cases:
            prompts = pair.prompts[chosen]
            task = progress.add_task(f"{label}, {drafter}", total=len(prompts))
            yield (
                (label, drafter),
                bench(
                    target,
                    drafters[drafter],
                    prompts,
                    n_tokens=options.tokens,
                    progress=lambda done, _, task=task: progress.update(task, completed=done),
                    n_ctx=512,
                    n_threads=options.threads,
                    n_threads_batch=options.threads,
                    # F16 caches: one row's attention is split among threads, several rows' is not (near-ties).
                    type_k=GGMLQuantizationType.Q8_0,
                    type_v=GGMLQuantizationType.Q8_0,
                ),
            )


def table(benches: dict[tuple[str, str], Bench]) -> Table:
    result = Table("target", "drafter", "equal", "loop-free", "L", "L loop-free", "c(w)")
    for column in ("plain tok/s", "drafted tok/s", "speedup"):
        result.add_column(column)
    for row in rows(benches):
        result.add_row(
            row["target"],
            row["drafter"],
            f"{row['equal']}/{row['prompts']}",
            f"{row['loop_free']}",
            *(f"{row[key]:.2f}" for key in ("accepted_length", "accepted_length_loop_free", "cycle_cost")),
            *(f"{row[key]:.0f}" for key in ("plain_tokens_per_second", "drafted_tokens_per_second")),
            f"{row['speedup']:.2f}x",
        )
    return result


def rows(benches: dict[tuple[str, str], Bench]) -> list[dict]:
    return [
        {
            "target": target,
            "drafter": drafter,
            "prompts": len(result.runs),
            "equal": result.n_equal,
            "loop_free": len(result.without_loops().runs),
            "accepted_length": result.accepted_length,
            "accepted_length_loop_free": loop_free_length(result),
            "acceptance": result.acceptance,
            "cycle_cost": result.cycle_cost,
            "plain_tokens_per_second": result.plain_tokens_per_second,
            "drafted_tokens_per_second": result.drafted_tokens_per_second,
            "speedup": result.speedup,
            "stage_ms": dict(result.stage_ms),
        }
        for (target, drafter), result in benches.items()
    ]


def loop_free_length(result: Bench) -> float:
    kept = result.without_loops()
    return kept.accepted_length if kept.runs else 0.0


def missed(benches: dict[tuple[str, str], Bench]) -> list[str]:
    """The bars that these numbers do not reach, one sentence each."""
    v2, v1 = (loop_free_length(benches["demo Q8_0", version]) for version in ("v2", "v1"))
    speedup = benches["cost-scaled F16", "v2"].speedup
    bars = [
        (v2 >= LEAST_ACCEPTED_LENGTH, f"accepted length of v2 is {v2:.2f}, needed {LEAST_ACCEPTED_LENGTH}"),
        (v2 >= LEAST_GAIN_OVER_V1 * v1, f"v2 accepts {v2 / max(v1, 1):.2f} times v1, needed {LEAST_GAIN_OVER_V1}"),
        (speedup >= LEAST_SPEEDUP, f"speedup on the cost-scaled F16 target is {speedup:.2f}, needed {LEAST_SPEEDUP}"),
    ]
    differing = {case: len(result.runs) - result.n_equal for case, result in benches.items() if "demo" in case[0]}
    bars += [(n == 0, f"{n} prompts of {' with '.join(case)} differ with drafting") for case, n in differing.items()]
    return [text for reached, text in bars if not reached]


def machine(options: argparse.Namespace) -> dict:
    library = "patched" if native.library().patched else "stock"
    return {
        "system": platform.platform(),
        "processor": processor(),
        "threads": options.threads,
        "library": library,
    }


def processor() -> str:
    """The CPU's own name on Linux, the architecture elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    sys.exit(main())
