"""What `create_completion` adds to `generate`: tokens per second of both, on the demo pair, of `llama_cpp.Llama` too.

Every turn runs each way of asking for the same tokens once, after one another, so that what else the machine does
falls on all of them; a ratio is the median of the turns' ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

from llama_cpp import Llama
from rich.console import Console
from rich.table import Table

from dflash2 import DFlashLlama
from dflash2.converter import convert
from dflash2.demo import demo_pair

LEAST_SHARE = 0.9  # of generate's tokens per second, whole answers

Way = Callable[[Llama, str, int], int]


def generated(llama: Llama, prompt: str, n: int) -> int:
    generator = llama.generate(llama.tokenize(prompt.encode(), special=True), temp=0.0)
    return sum(1 for _ in zip(range(n), generator, strict=False))


def whole(llama: Llama, prompt: str, n: int) -> int:
    return llama.create_completion(prompt, max_tokens=n, temperature=0.0)["usage"]["completion_tokens"]


def stopped(llama: Llama, prompt: str, n: int) -> int:
    answer = llama.create_completion(prompt, max_tokens=n, temperature=0.0, stop=["\0never\0"])
    return answer["usage"]["completion_tokens"]


def streamed(llama: Llama, prompt: str, n: int) -> int:
    for _ in llama.create_completion(prompt, max_tokens=n, temperature=0.0, stream=True):
        pass
    return n


WAYS: dict[str, Way] = {"generate": generated, "whole": whole, "with a stop": stopped, "streamed": streamed}


def main(argv: list[str] | None = None) -> int:
    """Measure, print the table; with --check, 1 when a bar is missed."""
    options = parse(argv)
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(options, Path(folder))
    console.print(table(rows))
    for text in (bars := missed(rows)):
        console.print(f"missed: {text}")
    if options.json:
        options.json.write_text(
            json.dumps({"tokens": options.tokens, "turns": options.turns, "rows": rows}, indent=2) + "\n"
        )
    return int(options.check and bool(bars))


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=800, help="new tokens per request (default: 800)")
    parser.add_argument("--turns", type=int, default=5, help="turns (default: 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers as JSON")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a bar is missed")
    return parser.parse_args(argv)


def measure(options: argparse.Namespace, folder: Path) -> list[dict]:
    """One row per object and way: median tokens per second, and the median share of `generate`'s."""
    pair = demo_pair()
    drafter = folder / "drafter.gguf"
    convert(pair.drafter, pair.target, drafter, outtype="f32")
    common = {"n_ctx": options.tokens + 300, "n_threads": 1, "n_threads_batch": 1, "flash_attn": True, "verbose": False}
    objects = {
        "llama_cpp.Llama": Llama(str(pair.target), **common),
        "DFlashLlama, depth 0": DFlashLlama(pair.target, drafter, depth=0, **common),
        "DFlashLlama": DFlashLlama(pair.target, drafter, depth=None, auto_disable=False, **common),
    }
    prompt = next(p for p in pair.prompts if whole(objects["DFlashLlama"], p, options.tokens) == options.tokens)
    seconds: dict[tuple[str, str], list[float]] = {(name, way): [] for name in objects for way in WAYS}
    for _ in range(options.turns):
        for name, llama in objects.items():
            for way, ask in WAYS.items():
                llama.reset()
                begin = perf_counter()
                if ask(llama, prompt, options.tokens) != options.tokens:
                    raise SystemExit(f"{name}, {way}: fewer than {options.tokens} tokens came")
                seconds[name, way].append(perf_counter() - begin)
    for llama in objects.values():
        llama.close()
    return [
        {
            "object": name,
            "way": way,
            "tokens_per_second": options.tokens / statistics.median(taken),
            "share": statistics.median(g / s for g, s in zip(seconds[name, "generate"], taken, strict=True)),
        }
        for (name, way), taken in seconds.items()
    ]


def table(rows: list[dict]) -> Table:
    result = Table("object", "way", "tok/s", "of generate")
    for row in rows:
        result.add_row(row["object"], row["way"], f"{row['tokens_per_second']:.0f}", f"{row['share']:.2f}x")
    return result


def missed(rows: list[dict]) -> list[str]:
    """The bars that these numbers do not reach, one sentence each."""
    ours = [row for row in rows if row["object"] != "llama_cpp.Llama" and row["way"] != "streamed"]
    return [
        f"{row['object']}, {row['way']}: {row['share']:.2f} of generate's tokens per second, needed {LEAST_SHARE}"
        for row in ours
        if row["share"] < LEAST_SHARE
    ]


if __name__ == "__main__":
    sys.exit(main())
