"""The runtime's speed in numbers: every bar it has to reach, in one table.

Whatever is compared runs in turns, prompt by prompt; a ratio is the median over the prompts. Tokens per second are
those of `generate`, from the first token to the last. On a machine shared with others, `--clock cpu --threads 1` counts
the processor's time of either side; the depths are then chosen by it too.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import urllib.request
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter, process_time

import completion
import prefix
import sampling
from gguf.constants import GGMLQuantizationType
from llama_cpp import Llama
from rich.console import Console
from rich.table import Table

from dflash2 import DFlashLlama, native
from dflash2.converter import convert
from dflash2.demo import demo_pair
from dflash2.evidence import scaled_target
from dflash2.patches import build

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from llama_server import LlamaServer

FIXED = (1, 2, 3, 5, 7)
PROSE = (
    "The old lighthouse stood at the end of the pier, and",
    "In the spring of that year the river rose so high that",
    "My grandmother used to say that bread wants patience,",
    "It was not the first letter he had written to her, but",
    "Nobody in the village could remember when the mill",
)
BATCH = 512


@dataclass(frozen=True)
class Row:
    """One comparison: `value`, to be at least (or at most) `bar`; None where nothing is asked."""

    what: str
    against: str
    value: float
    unit: str = "x"
    bar: float | None = None
    at_most: bool = False
    detail: str = ""

    @property
    def missed(self) -> bool:
        """Whether the bar is not reached."""
        return self.bar is not None and (self.value > self.bar if self.at_most else self.value < self.bar)


def main(argv: list[str] | None = None) -> int:
    """Measure, print the table; with --check, 1 when a bar is missed."""
    options = parse(argv)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for part in options.parts:
            rows += PARTS[part](options, Path(folder))
            Console(stderr=True).print(f"{part}: measured")
            if options.json:
                write(options, rows)
    Console(width=170).print(table(rows))
    return int(options.check and any(row.missed for row in rows))


def write(options: Namespace, rows: Sequence[Row]) -> None:
    machine = {
        "system": platform.platform(),
        "threads": options.threads,
        "clock": options.clock,
        "library": "patched" if native.library().patched else "stock",
    }
    shown = [{**asdict(row), "missed": row.missed} for row in rows]
    options.json.write_text(json.dumps({"machine": machine, "rows": shown}, indent=2) + "\n")


def parse(argv: list[str] | None) -> Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=[*PARTS], metavar="PART", help=f"of {', '.join(PARTS)} (all)")
    parser.add_argument("--prompts", type=int, default=10, help="prompts of the demo pair (default: 10)")
    parser.add_argument("--tokens", type=int, default=200, help="new tokens per prompt (default: 200)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers as JSON")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a bar is missed")
    options = parser.parse_args(argv)
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"unknown part: {', '.join(sorted(unknown))}")
    if options.clock == "cpu" and options.threads != 1:
        parser.error("--clock cpu needs --threads 1")
    return options


def clock(options: Namespace) -> Callable[[], float]:
    return process_time if options.clock == "cpu" else perf_counter


def opened(options: Namespace, target: Path, folder: Path, **kwargs: object) -> DFlashLlama:
    """The demo drafter on `target`, F16 caches replaced: their near-ties fall differently with several threads."""
    pair = demo_pair()
    drafter = folder / "drafter.gguf"
    if not drafter.exists():
        convert(pair.drafter, pair.target, drafter)
    llm = DFlashLlama(target, drafter, auto_disable=False, **{**common(options), **kwargs})
    llm._session.recorder.clock = clock(options)
    return llm


def common(options: Namespace) -> dict[str, object]:
    return {
        "n_ctx": 512,
        "n_batch": BATCH,
        "n_ubatch": BATCH,
        "n_threads": options.threads,
        "n_threads_batch": options.threads,
        "flash_attn": True,
        "type_k": GGMLQuantizationType.Q8_0,
        "type_v": GGMLQuantizationType.Q8_0,
        "verbose": False,
    }


def prompts_of(options: Namespace, llm: Llama, *, prose: bool = False) -> list[list[int]]:
    code = demo_pair().prompts[: options.prompts]
    return [llm.tokenize(text.encode()) for text in [*code, *(PROSE[: options.prompts] if prose else ())]]


def generated(options: Namespace, llm: Llama, prompt: list[int]) -> tuple[list[int], float]:
    """Tokens, and how many a second."""
    now = clock(options)
    llm.reset()
    stream = llm.generate(prompt, temp=0.0)
    tokens = [next(stream)]
    begun = now()
    tokens += [token for _, token in zip(range(options.tokens - 1), stream, strict=False)]
    seconds = now() - begun
    stream.close()
    return tokens, (len(tokens) - 1) / seconds


def in_turns(options: Namespace, objects: Sequence[Llama], prompts: Sequence[list[int]]) -> list[list[float]]:
    """Tokens per second of every object after every prompt, the first prompt once more beforehand to warm up."""
    speeds: list[list[float]] = [[] for _ in objects]
    for n, prompt in enumerate([prompts[0], *prompts]):
        texts = []
        for i in range(len(objects)) if n % 2 else reversed(range(len(objects))):
            tokens, speed = generated(options, objects[i], prompt)
            texts.append(tokens)
            if n:
                speeds[i].append(speed)
        if any(text != texts[0] for text in texts):
            print(f"prompt {n}: the texts differ", file=sys.stderr)
    return speeds


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return median(a / b for a, b in zip(ours, theirs, strict=True))


def per_second(*speeds: Sequence[float]) -> str:
    return " against ".join(f"{median(each):.0f}" for each in speeds) + " tok/s"


def server(options: Namespace, folder: Path) -> Iterator[Row]:
    """Against the stock llama-server, which drafts 7: as it does, and with the depth that is found."""
    pair = demo_pair()
    for name, target in (("demo pair", pair.target), ("cost-scaled", scaled_target(pair.target, weights="f16"))):
        caches = {"type_k": None, "type_v": None}
        llm, auto = opened(options, target, folder, depth=None, **caches), opened(options, target, folder, **caches)
        arguments = server_arguments(options, target, folder)
        speeds = []
        with (
            closing(llm),
            closing(auto),
            LlamaServer(build(stock=True).server, arguments, folder / f"{name}.log") as process,
        ):
            prompts = prompts_of(options, llm)
            for n, prompt in enumerate([prompts[0], *prompts]):
                first = served(options, process, prompt) if n % 2 else None
                ours, found = (generated(options, each, prompt)[1] for each in (llm, auto))
                theirs = first if n % 2 else served(options, process, prompt)
                if n and theirs:  # the first round warms up; the server ends at an end-of-text token
                    speeds.append((ours, found, theirs))
        ours, found, theirs = zip(*speeds, strict=True)
        for depth, each in (("7", ours), ('"auto"', found)):
            detail = per_second(each, theirs)
            yield Row(f"{name}, depth={depth}, T=0", "stock llama-server", ratio(each, theirs), bar=1.1, detail=detail)


def server_arguments(options: Namespace, target: Path, folder: Path) -> list[str]:
    return [
        *("--model", str(target), "--ctx-size", "512", "--parallel", "1", "--no-kv-unified", "--fit", "off"),
        *("--batch-size", str(BATCH), "--ubatch-size", str(BATCH), "--flash-attn", "on", "--cache-ram", "0"),
        *("--threads", str(options.threads), "--threads-batch", str(options.threads)),
        *("--spec-type", "draft-dflash", "--spec-draft-model", str(folder / "drafter.gguf")),
        *("--spec-draft-n-max", "7"),
        "--repack" if native.repacking_is_safe() else "--no-repack",
    ]


def served(options: Namespace, process: LlamaServer, prompt: list[int]) -> float | None:
    """Tokens per second of one request, the prompt and the first token left out; None if it ended early."""
    spent = {}
    for n in (1, options.tokens):
        begun = processor_seconds(process)
        answer = post(process.url, {"prompt": prompt, "n_predict": n, "temperature": 0, "cache_prompt": False})
        spent[n] = processor_seconds(process) - begun
    timings = answer["timings"]
    if timings["predicted_n"] < options.tokens:
        return None
    seconds = timings["predicted_ms"] / 1e3 if options.clock == "wall" else spent[options.tokens] - spent[1]
    return (options.tokens - 1) / seconds


def post(url: str, request: dict) -> dict:
    body = json.dumps(request).encode()
    with urllib.request.urlopen(urllib.request.Request(url + "/completion", data=body), timeout=600) as answer:
        return json.load(answer)


def processor_seconds(process: LlamaServer) -> float:
    """Processor time of all threads of the server so far; 0 where the system does not tell."""
    tasks = Path(f"/proc/{process._process.pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def scaled(options: Namespace, folder: Path) -> Iterator[Row]:
    """On a target that costs what a real one does, with the depth that is found."""
    target = scaled_target(demo_pair().target, weights="f16")
    yield from chosen_depth(options, folder, target, "cost-scaled 150 M target, T=0", least=1.8)


def plain(options: Namespace, folder: Path) -> Iterator[Row]:
    """On the demo target, where drafting does not pay on a processor."""
    target = demo_pair().target
    yield from chosen_depth(options, folder, target, 'demo pair, depth="auto", T=0', least=0.97)


def chosen_depth(options: Namespace, folder: Path, target: Path, what: str, least: float) -> Iterator[Row]:
    auto, off = opened(options, target, folder), opened(options, target, folder, depth=0)
    stock = Llama(str(target), **common(options))
    with closing(auto), closing(off), closing(stock):
        speeds = in_turns(options, (auto, off, stock), prompts_of(options, auto))
        found = f"; cycles at depth 0, 1, ...: {auto.stats.at_depth}"
        yield Row(
            what, "the same, depth 0", ratio(speeds[0], speeds[1]), bar=least, detail=per_second(*speeds[:2]) + found
        )
        yield Row(
            what, "llama_cpp.Llama", ratio(speeds[0], speeds[2]), bar=least, detail=per_second(speeds[0], speeds[2])
        )


def fixed(options: Namespace, folder: Path) -> Iterator[Row]:
    """The depth that is found against every fixed one, over code and prose."""
    pair = demo_pair()
    for name, target in (("cost-scaled", scaled_target(pair.target, weights="f16")), ("demo", pair.target)):
        auto = opened(options, target, folder)
        others = [opened(options, target, folder, depth=depth) for depth in FIXED]
        speeds = in_turns(options, (auto, *others), prompts_of(options, auto, prose=True))
        for llm in (auto, *others):
            llm.close()
        # Not the best depth of each prompt, which nobody knows beforehand: the best over all of them.
        seconds = [sum(1 / speed for speed in each) for each in speeds]
        best = min(range(1, len(seconds)), key=seconds.__getitem__)
        yield Row(
            f"{name} target, auto",
            f"best fixed depth ({FIXED[best - 1]})",
            seconds[best] / seconds[0],
            bar=0.97,
            detail="tok/s at "
            + ", ".join(
                f"{depth}: {len(each) / total:.0f}"
                for depth, each, total in zip(("auto", *FIXED), speeds, seconds, strict=True)
            ),
        )


def blocks(options: Namespace, folder: Path) -> Iterator[Row]:
    """A shortened draft block against a whole one of which as much is verified."""
    for depth in (5, 3, 1):
        lengths, drafts = [], []
        for block in (depth + 1, None):
            llm = opened(options, demo_pair().target, folder, depth=depth, draft_block=block)
            with closing(llm):
                for prompt in prompts_of(options, llm):
                    generated(options, llm, prompt)
                stats = llm.stats
            lengths.append(stats.accepted_length)
            drafts.append(1e3 * stats.seconds["draft"] / stats.cycles)
        detail = f"{drafts[0]:.2f} against {drafts[1]:.2f} ms a draft"
        against = f"block {8} cut to it"
        yield Row(f"accepted length, block {depth + 1}", against, lengths[0] / lengths[1], detail=detail)


def lengths(options: Namespace, folder: Path) -> Iterator[Row]:
    """Accepted length of coupled sampling against the stock llama-server, and its rule ("match") in this package."""
    target, pair = demo_pair().target, Namespace(prompts=40, tokens=options.tokens, threads=options.threads)
    llm = opened(options, target, folder, depth=None)
    prompts = prompts_of(Namespace(prompts=pair.prompts), llm)
    llm.close()
    arguments = [*server_arguments(options, target, folder), "--cache-type-k", "q8_0", "--cache-type-v", "q8_0"]
    with LlamaServer(build(stock=True).server, arguments, folder / "lengths.log") as process:
        for setting, bar in sampling.BARS.items():
            chain = dict(sampling.LENGTHS[setting])
            request = {"n_predict": options.tokens, "temperature": chain.pop("temp"), "cache_prompt": False, **chain}
            tokens = accepted = 0
            for seed, prompt in enumerate(prompts):
                timings = post(process.url, {"prompt": prompt, "seed": 100 + seed, **request})["timings"]
                tokens += timings["predicted_n"] - 1  # the first one comes with the prompt
                accepted += timings["draft_n_accepted"]
            theirs = tokens / (tokens - accepted)
            row = sampling.lengths_at(pair, folder, demo_pair().drafter, setting)
            for against, length, least in (("stock llama-server", theirs, bar), ("match", row["match"], None)):
                detail = f"{row['coupled']:.2f} against {length:.2f}"
                yield Row(f"accepted length, {setting}", against, row["coupled"] / length, bar=least, detail=detail)


def python(options: Namespace, folder: Path) -> Iterator[Row]:
    """Python's own time at a large vocabulary (`benchmarks/sampling.py`)."""
    _, measured, _ = sampling.costs(Namespace(tokens=options.tokens, threads=options.threads), folder)
    greedy, sampled = measured["T=0"], measured["T=0.8, top-k 20, top-p 0.95, coupled"]
    most = {"unit": " ms", "bar": sampling.MOST_MS, "at_most": True}
    yield Row("Python per cycle, vocabulary 151k, T=0", "-", greedy["cycle"], **most)
    yield Row("Python per row, T=0.8, top-k 20, top-p 0.95", "-", sampled["row"], **most)


def prefill(options: Namespace, folder: Path) -> Iterator[Row]:
    """Evaluation of a long prompt with injection (`benchmarks/prefix.py`)."""
    arguments = ["--threads", str(options.threads), "--clock", options.clock, "--repeats", "2"]
    for row in map(prefix.summary, prefix.prefill(prefix.parse(arguments), folder)):
        detail = f"{1e3 * row['seconds']:.0f} against {1e3 * row['seconds_against']:.0f} ms"
        yield Row(row["what"], row["against"], row["speed_ratio"], bar=row["least"] or None, detail=detail)


def whole(_: Namespace, folder: Path) -> Iterator[Row]:
    """`create_completion` against `generate` (`benchmarks/completion.py`)."""
    for row in completion.measure(completion.parse([]), folder):
        if row["way"] == "whole":
            least = None if row["object"] == "llama_cpp.Llama" else completion.LEAST_SHARE
            detail = f"{row['tokens_per_second']:.0f} tok/s"
            yield Row(
                f"create_completion, 800 tokens, {row['object']}", "generate", row["share"], bar=least, detail=detail
            )


PARTS: dict[str, Callable[[Namespace, Path], Iterator[Row]]] = {
    "server": server,
    "lengths": lengths,
    "prefill": prefill,
    "scaled": scaled,
    "plain": plain,
    "fixed": fixed,
    "blocks": blocks,
    "python": python,
    "completion": whole,
}


def table(rows: Sequence[Row]) -> Table:
    shown = Table("measured", "against", "value", "bar", "", "detail")
    for row in rows:
        digits = 3 if row.unit != "x" else 2
        bar = "" if row.bar is None else f"{'at most' if row.at_most else 'at least'} {row.bar:.2f}{row.unit}"
        verdict = "" if row.bar is None else "missed" if row.missed else "ok"
        shown.add_row(row.what, row.against, f"{row.value:.{digits}f}{row.unit}", bar, verdict, row.detail)
    return shown


if __name__ == "__main__":
    raise SystemExit(main())
