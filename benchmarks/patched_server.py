"""The patched llama-server against the stock one on the demo pair: what is accepted, and how fast it is.

Accepted length and speed are told apart. Both servers run at once and answer in turns, request by request; a ratio of
speeds is the median over the requests of tokens per second as the servers count them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from demo_pair import machine
from llama_cpp import Llama
from rich.console import Console
from rich.table import Table
from sampling import wide_pair

from dflash2.converter import convert
from dflash2.demo import demo_pair
from dflash2.patches import build

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from llama_server import LlamaServer
from server_pair import EXACT_CACHE_OPTIONS, EXACT_DRAFT_CACHE_OPTIONS, server_arguments

NEUTRAL = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
TRUNCATED = {"top_k": 20, "top_p": 0.95, "min_p": 0.0}
GREEDY = {"temperature": 0.0}
SAMPLED = {
    "T=1": {**NEUTRAL, "temperature": 1.0},
    "T=1, top-k 20, top-p 0.95": {**TRUNCATED, "temperature": 1.0},
    "T=0.6": {**NEUTRAL, "temperature": 0.6},
    "T=0.6, top-k 20, top-p 0.95": {**TRUNCATED, "temperature": 0.6},
}
LEAST_GAIN = {"T=1, top-k 20, top-p 0.95": 1.08}
LEAST_SHARE = 0.98  # of the stock speed where nothing is drafted: noise of a shared machine
COUPLED = ("--spec-draft-verify", "coupled")


@dataclass(frozen=True)
class Row:
    """`value` of `what`, patched over stock unless `against` says otherwise; at least `bar` where one is set."""

    what: str
    against: str
    value: float
    detail: str
    bar: float | None = None

    @property
    def missed(self) -> bool:
        """Whether the bar is not reached."""
        return self.bar is not None and self.value < self.bar


@dataclass(frozen=True)
class Bench:
    """What the parts share: the programs, the pair's files, the prompts as token ids."""

    options: Namespace
    folder: Path
    target: Path
    drafter: Path
    prompts: list[list[int]]

    def open(self, stack: ExitStack, program: Path, *extra: str, drafts: bool = True, **how: object) -> LlamaServer:
        """A server of `program` until `stack` is left."""
        drafter = how.get("drafter", self.drafter) if drafts else None
        arguments = [
            *server_arguments(how.get("target", self.target), drafter),
            *(*EXACT_CACHE_OPTIONS, *(EXACT_DRAFT_CACHE_OPTIONS if drafts else ())),
            *("--threads", str(self.options.threads), "--threads-batch", str(self.options.threads), *extra),
        ]
        log = self.folder / f"server-{len(list(self.folder.glob('*.log')))}.log"
        return stack.enter_context(LlamaServer(program, arguments, log, how.get("environment")))

    def in_turns(self, servers: Sequence[LlamaServer], chain: dict) -> list[list[dict]]:
        """Every server's answers to every prompt, the first prompt once more beforehand to warm up."""
        answers: list[list[dict]] = [[] for _ in servers]
        for n, prompt in enumerate([self.prompts[0], *self.prompts]):
            for i in range(len(servers)) if n % 2 else reversed(range(len(servers))):
                answer = servers[i].answer(prompt, self.options.tokens, seed=100 + n, **chain)
                if n:
                    answers[i].append(answer)
        return answers


def accepted_length(answers: Sequence[dict]) -> float:
    """Tokens per verified block, from the number of blocks that drafted."""
    timings = [answer["timings"] for answer in answers]
    drafted = sum(t.get("draft_n_accepted", 0) for t in timings)
    return 1 + drafted / sum(cycles(answer) for answer in answers)


def cycles(answer: dict) -> int:
    """Blocks verified: a token comes from the prompt, from each block one of the target's own, the rest are drafts.

    A block without drafts, where one token was still wanted, counts as one: it is one for both sides.
    """
    timings = answer["timings"]
    return timings["predicted_n"] - 1 - timings.get("draft_n_accepted", 0)


def speed_ratio(ours: Sequence[dict], theirs: Sequence[dict]) -> tuple[float, str]:
    """Median ratio of tokens per second, and both medians in words."""
    speeds = [[answer["timings"]["predicted_per_second"] for answer in answers] for answers in (ours, theirs)]
    ratio = median(a / b for a, b in zip(*speeds, strict=True))
    return ratio, f"{median(speeds[0]):.0f} against {median(speeds[1]):.0f} tok/s"


def equal_texts(ours: Sequence[dict], theirs: Sequence[dict]) -> tuple[float, str]:
    """Share of the answers that are token for token the same, and their number in words."""
    same = sum(a["tokens"] == b["tokens"] for a, b in zip(ours, theirs, strict=True))
    return same / len(ours), f"{same}/{len(ours)}"


def lengths(ours: Sequence[dict], theirs: Sequence[dict]) -> tuple[float, str]:
    """Ratio of the accepted lengths, and both in words."""
    a, b = accepted_length(ours), accepted_length(theirs)
    return a / b, f"{a:.2f} against {b:.2f}"


def sampled(bench: Bench) -> Iterator[Row]:
    """Coupled against stock verification."""
    with ExitStack() as stack:
        ours, theirs = (bench.open(stack, program) for program in (bench.options.patched, bench.options.stock))
        alone = bench.open(stack, bench.options.patched, *COUPLED, drafts=False)
        for setting, chain in SAMPLED.items():
            drafted, stock, plain = bench.in_turns((ours, theirs, alone), chain)
            yield Row(f"accepted length, {setting}", "stock", *lengths(drafted, stock), LEAST_GAIN.get(setting))
            yield Row(f"equal texts, {setting}", "no drafting, same seed", *equal_texts(drafted, plain), 1.0)
            yield Row(f"tokens/s, {setting}", "stock", *speed_ratio(drafted, stock))


def greedy(bench: Bench) -> Iterator[Row]:
    """At temperature 0."""
    with ExitStack() as stack:
        servers = [bench.open(stack, program) for program in (bench.options.patched, bench.options.stock)]
        ours, theirs = bench.in_turns(servers, GREEDY)
        yield Row("equal texts, T=0", "stock", *equal_texts(ours, theirs), 1.0)
        yield Row("accepted length, T=0", "stock", *lengths(ours, theirs))
        yield Row("tokens/s, T=0", "stock", *speed_ratio(ours, theirs))


def alone(bench: Bench) -> Iterator[Row]:
    """Without a drafter."""
    for name, chain, rule in (("T=0", GREEDY, ()), ("T=1, coupled", SAMPLED["T=1"], COUPLED)):
        with ExitStack() as stack:
            ours = bench.open(stack, bench.options.patched, *rule, drafts=False)
            theirs = bench.open(stack, bench.options.stock, drafts=False)
            answers = bench.in_turns((ours, theirs), chain)
            ratio, detail = speed_ratio(*answers)
            yield Row(f"target alone, tokens/s, {name}", "stock", ratio, detail, LEAST_SHARE)


def blocks(bench: Bench) -> Iterator[Row]:
    """A whole draft block of which `n` drafts are verified, against a block that is only as wide."""
    for n in (5, 3, 1):
        for name, chain in (("T=0", GREEDY), ("T=1, top-k 20, top-p 0.95", SAMPLED["T=1, top-k 20, top-p 0.95"])):
            with ExitStack() as stack:
                servers = [
                    bench.open(
                        stack, bench.options.patched, "--spec-draft-n-max", str(n), "--spec-draft-block", str(block)
                    )
                    for block in (8, 0)
                ]
                whole, cut = bench.in_turns(servers, chain)
                against = f"block {n + 1}"
                yield Row(f"accepted length, block 8, {n} verified, {name}", against, *lengths(whole, cut))
                yield Row(f"tokens/s, block 8, {n} verified, {name}", against, *speed_ratio(whole, cut))


def wide(bench: Bench) -> Iterator[Row]:
    """At a vocabulary of 151,936."""
    target, drafter = wide_pair(bench.folder)
    pair = {"target": target, "drafter": drafter}
    with ExitStack() as stack:
        servers = [
            bench.open(stack, bench.options.patched, **pair),
            bench.open(stack, bench.options.patched, **pair, environment={"DFLASH2_NO_GREEDY": "1"}),
        ]
        yield Row(
            "tokens/s, T=0, vocabulary 151k", "DFLASH2_NO_GREEDY=1", *speed_ratio(*bench.in_turns(servers, GREEDY))
        )
    with ExitStack() as stack:
        servers = [bench.open(stack, bench.options.patched, "--spec-draft-verify", rule, **pair) for rule in RULES]
        for setting, chain in SAMPLED.items():
            ratio, detail = speed_ratio(*bench.in_turns(servers, chain))
            yield Row(f"tokens/s, {setting}, vocabulary 151k", "match", ratio, detail)


RULES = ("coupled", "match")
PARTS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "sampled": sampled,
    "greedy": greedy,
    "alone": alone,
    "blocks": blocks,
    "wide": wide,
}


def main(argv: list[str] | None = None) -> int:
    """Measure, print the table; with --check, 1 when a bar is missed."""
    options = parse(argv)
    pair = demo_pair()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        convert(pair.drafter, pair.target, folder / "drafter.gguf", outtype="q8_0")
        tokenizer = Llama(str(pair.target), vocab_only=True, verbose=False)
        prompts = [tokenizer.tokenize(text.encode()) for text in pair.prompts[: options.prompts]]
        bench = Bench(options, folder, pair.target, folder / "drafter.gguf", prompts)
        for part in options.parts:
            rows += PARTS[part](bench)
            Console(stderr=True).print(f"{part}: measured")
    Console(width=150).print(table(rows))
    if options.json:
        shown = [{**asdict(row), "missed": row.missed} for row in rows]
        options.json.write_text(json.dumps({"machine": machine(options), "rows": shown}, indent=2) + "\n")
    return int(options.check and any(row.missed for row in rows))


def parse(argv: list[str] | None) -> Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=[*PARTS], metavar="PART", help=f"of {', '.join(PARTS)} (all)")
    parser.add_argument("--patched", type=Path, required=True, help="the patched llama-server")
    parser.add_argument("--stock", type=Path, help="the stock one (default: the one that is built from the pin)")
    parser.add_argument("--prompts", type=int, default=20, help="prompts of the demo pair (default: 20)")
    parser.add_argument("--tokens", type=int, default=200, help="new tokens per prompt (default: 200)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers as JSON")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a bar is missed")
    options = parser.parse_args(argv)
    options.stock = options.stock or build(stock=True).server
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"unknown part: {', '.join(sorted(unknown))}")
    return options


def table(rows: Sequence[Row]) -> Table:
    shown = Table("measured", "against", "ratio", "bar", "", "detail")
    for row in rows:
        bar = "" if row.bar is None else f"at least {row.bar:.2f}"
        verdict = "" if row.bar is None else "missed" if row.missed else "ok"
        shown.add_row(row.what, row.against, f"{row.value:.3f}", bar, verdict, row.detail)
    return shown


if __name__ == "__main__":
    raise SystemExit(main())
