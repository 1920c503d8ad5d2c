"""Sampling in numbers: is a seed's text the same with drafting, how much is accepted, what does Python cost.

Accepted length is given for the three ways to verify. "match" is also the rule of `llama-server`, which accepts a draft
if llama.cpp's own sample equals it. Costs are measured on the demo pair with its vocabulary filled up to 151,936.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
from gguf import GGUFReader, GGUFWriter
from gguf.constants import GGMLQuantizationType, GGUFValueType
from llama_cpp import LlamaGrammar, LogitsProcessorList
from rich.console import Console
from rich.table import Table

from dflash2 import DFlashLlama
from dflash2.converter import convert
from dflash2.demo import demo_pair
from dflash2.evidence import scaled_target

NEUTRAL = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
TRUNCATED = {"top_k": 20, "top_p": 0.95, "min_p": 0.0}
WORDS = 'root ::= ("self" | "return" | "if" | " " | "\\n" | "(" | ")" | [a-z])+'
MODES = ("match", "rejection", "coupled")
LENGTHS = {
    "T=1": {"temp": 1.0, **NEUTRAL},
    "T=1, top-k 20, top-p 0.95": {"temp": 1.0, **TRUNCATED},
    "T=0.6": {"temp": 0.6, **NEUTRAL},
    "T=0.6, top-k 20, top-p 0.95": {"temp": 0.6, **TRUNCATED},
}
# Accepted length of coupled sampling over that of matching, v2 drafter.
BARS = {"T=1, top-k 20, top-p 0.95": 1.10, "T=0.6, top-k 20, top-p 0.95": 1.0}
VOCABULARY = 151_936
FOREIGN = ("_decode", "_seq_rm", "_get_logits")  # what a context calls in llama.cpp each cycle
MOST_MS = 0.3  # per row read at T = 0.8, top-k 20, top-p 0.95, and per cycle at T = 0


def main(argv: list[str] | None = None) -> int:
    """Measure, print the tables; with --check, 1 when a bar is missed."""
    options = parse(argv)
    console = Console()
    missed: list[str] = []
    results: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, measure in (("equal", equality), ("lengths", accepted_lengths), ("costs", costs)):
            if name in options.parts:
                table, results[name], bars = measure(options, Path(folder))
                console.print(table)
                missed += bars
    for text in missed:
        console.print(f"missed: {text}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    return int(options.check and bool(missed))


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=["equal", "lengths", "costs"], help="equal, lengths, costs")
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=200, help="new tokens per prompt")
    parser.add_argument(
        "--weights",
        nargs="+",
        default=["q8_0", "q4_0"],
        metavar="TYPE",
        help="of the targets whose texts are compared; f16 and f32 need a library without llamafile and repacking",
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers as JSON")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a bar is missed")
    return parser.parse_args(argv)


def discourage(input_ids, scores):
    """A logits processor that depends on every token so far."""
    scores = scores.copy()
    scores[input_ids[-8:]] -= 2.0
    return scores


def chains() -> Iterator[tuple[str, dict]]:
    yield "greedy", {"temp": 0.0}
    for temp in (0.3, 0.7, 1.0, 1.5):
        for name, extra in (
            ("", NEUTRAL),
            ("top-k 20", {**NEUTRAL, "top_k": 20}),
            ("top-p 0.9", {**NEUTRAL, "top_p": 0.9}),
            ("min-p 0.05", {**NEUTRAL, "min_p": 0.05}),
            ("penalties", {"repeat_penalty": 1.3, "frequency_penalty": 0.2, "presence_penalty": 0.1}),
            ("grammar", {"grammar": LlamaGrammar.from_string(WORDS, verbose=False)}),
            ("processor", {"logits_processor": LogitsProcessorList([discourage])}),
        ):
            yield f"T={temp} {name}".strip(), {"temp": temp, **extra}


@contextmanager
def opened(target: Path, drafter: Path, threads: int, **kwargs: object) -> Iterator[DFlashLlama]:
    llm = DFlashLlama(
        target,
        drafter,
        n_ctx=512,
        n_threads=threads,
        n_threads_batch=threads,
        depth=None,
        auto_disable=False,
        verbose=False,
        # F16 caches: one row's attention is split among threads, several rows' is not (near-ties).
        type_k=GGMLQuantizationType.Q8_0,
        type_v=GGMLQuantizationType.Q8_0,
        **kwargs,
    )
    yield llm
    llm.close()


def drafter_of(folder: Path, checkpoint: Path, target: Path) -> Path:
    output = folder / f"{checkpoint.name}-{target.stem}.gguf"
    if not output.exists():
        convert(checkpoint, target, output)
    return output


def take(llm: DFlashLlama, prompt: list[int], n: int, seed: int, **chain: object) -> list[int]:
    llm.reset()
    llm.set_seed(seed)
    stream = llm.generate(prompt, **chain)
    tokens = [token for _, token in zip(range(n), stream, strict=False)]
    stream.close()
    return tokens


def equality(options: argparse.Namespace, folder: Path) -> tuple[Table, dict, list[str]]:
    """Prompts whose text is the same with drafting on and off, per target and chain."""
    pair = demo_pair()
    targets = {name: scaled_target(pair.target, parameters=0, weights=name) for name in options.weights}
    counts: dict[str, dict[str, int]] = {}
    for label, target in targets.items():
        with opened(target, drafter_of(folder, pair.drafter, pair.target), options.threads) as llm:
            prompts = [llm.tokenize(text.encode()) for text in pair.prompts[: options.prompts]]
            full = llm.depth
            for name, chain in chains():
                texts = []
                for llm.depth in (0, full):
                    texts.append([take(llm, p, options.tokens, 100 + i, **chain) for i, p in enumerate(prompts)])
                counts.setdefault(name, {})[label] = sum(a == b for a, b in zip(*texts, strict=True))
    n = len(prompts)
    table = Table("coupled, on against off", *targets, title=f"equal of {n} prompts x {options.tokens} tokens")
    for name, row in counts.items():
        table.add_row(name, *(f"{row[label]}/{n}" for label in targets))
    differing = [f"{n - k} texts differ: {name}, {t}" for name, row in counts.items() for t, k in row.items() if k < n]
    return table, counts, differing


def accepted_lengths(options: argparse.Namespace, folder: Path) -> tuple[Table, dict, list[str]]:
    """Accepted length per drafter, setting and mode."""
    lengths: dict[str, dict[str, float]] = {}
    for version, checkpoint in (("v2", demo_pair().drafter), ("v1", demo_pair().drafter_v1)):
        for setting in LENGTHS:
            lengths[f"{version}, {setting}"] = lengths_at(options, folder, checkpoint, setting)
    table = Table("accepted length", *MODES, "coupled / match")
    for name, row in lengths.items():
        table.add_row(name, *(f"{row[mode]:.2f}" for mode in MODES), f"{row['coupled'] / row['match']:.2f}x")
    missed = []
    for setting, bar in BARS.items():
        row = lengths[f"v2, {setting}"]
        if row["coupled"] < bar * row["match"]:
            missed.append(f"{setting}: coupled accepts {row['coupled'] / row['match']:.3f} of match, needed {bar}")
    return table, lengths, missed


def lengths_at(options: argparse.Namespace, folder: Path, checkpoint: Path, setting: str) -> dict[str, float]:
    """Accepted length of each mode on the demo target at one of LENGTHS."""
    pair = demo_pair()
    lengths = {}
    with opened(pair.target, drafter_of(folder, checkpoint, pair.target), options.threads) as llm:
        for llm.verify in MODES:
            llm.reset_stats()
            for i, text in enumerate(pair.prompts[: options.prompts]):
                take(llm, llm.tokenize(text.encode()), options.tokens, 100 + i, **LENGTHS[setting])
            lengths[llm.verify] = llm.stats.accepted_length
    return lengths


def costs(options: argparse.Namespace, folder: Path) -> tuple[Table, dict, list[str]]:
    """Milliseconds of Python at the large vocabulary: medians over cycles, llama.cpp's calls taken out."""
    target, drafter = wide_pair(folder)
    rows: dict[str, dict[str, float]] = {}
    with opened(target, drafter, options.threads) as llm:
        prompts = [llm.tokenize(text.encode()) for text in demo_pair().prompts[:5]]
        for name, chain, verify in (
            ("T=0", {"temp": 0.0}, "coupled"),
            ("T=0.8, top-k 20, top-p 0.95, coupled", {"temp": 0.8, **TRUNCATED}, "coupled"),
            ("T=0.8, top-k 20, top-p 0.95, rejection", {"temp": 0.8, **TRUNCATED}, "rejection"),
            ("T=0.8, top-k 20, top-p 0.95, match", {"temp": 0.8, **TRUNCATED}, "match"),
            ("defaults, coupled", {}, "coupled"),
        ):
            llm.verify = verify
            rows[name] = cost(llm, prompts, options.tokens, chain)
    table = Table("Python time, ms", "per cycle", "per row read", title=f"vocabulary of {VOCABULARY}")
    for name, row in rows.items():
        table.add_row(name, f"{row['cycle']:.3f}", f"{row['row']:.3f}" if "row" in row else "-")
    greedy, sampled = rows["T=0"]["cycle"], rows["T=0.8, top-k 20, top-p 0.95, coupled"]["row"]
    missed = [f"{greedy:.3f} ms per cycle at T=0, at most {MOST_MS}"] * (greedy > MOST_MS)
    missed += [f"{sampled:.3f} ms per row read, at most {MOST_MS}"] * (sampled > MOST_MS)
    return table, rows, missed


def cost(llm: DFlashLlama, prompts: list[list[int]], n: int, chain: dict) -> dict[str, float]:
    """Median ms per cycle outside llama.cpp's calls, and per call that chooses a token (sampler chain included)."""
    native, cycles, choices = [0.0], [], []
    contexts = (llm._session.target, llm._session.drafter)
    originals = [(context, name, getattr(context, name)) for context in contexts for name in FOREIGN]

    def timed(function, spent):
        def call(*arguments):
            begin = perf_counter()
            try:
                return function(*arguments)
            finally:
                spent(perf_counter() - begin)

        return call

    def add(seconds):
        native[0] += seconds

    rule_of = llm._sampling.rule

    def timed_rule(*arguments):
        rule = rule_of(*arguments)
        rule.choose = timed(rule.choose, choices.append)
        return rule

    def on_cycle(_):
        stats = llm.stats
        busy = sum(seconds for stage, seconds in stats.seconds.items() if stage != "host")
        cycles.append(busy - native[0])
        llm.reset_stats()
        native[0] = 0.0

    for context, name, function in originals:
        setattr(context, name, timed(function, add))
    llm._sampling.rule, llm.on_cycle = timed_rule, on_cycle
    try:
        for i, prompt in enumerate(prompts):
            take(llm, prompt, n, 100 + i, **chain)
            del cycles[-1:]  # closed inside
    finally:
        for context, name, function in originals:
            setattr(context, name, function)
        llm._sampling.rule, llm.on_cycle = rule_of, None
    result = {"cycle": 1e3 * median(cycles)}
    return {**result, "row": 1e3 * median(choices)} if choices else result


def wide_pair(folder: Path) -> tuple[Path, Path]:
    """The demo pair with tokens that never come added up to VOCABULARY."""
    pair = demo_pair()
    target = folder / "wide.gguf"
    reader = GGUFReader(pair.target)
    n = len(reader.fields["tokenizer.ggml.tokens"].contents())
    writer = GGUFWriter(target, "qwen3")
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        value = field.contents()
        if key == "tokenizer.ggml.tokens":
            value = [*value, *(f"<filler{i}>" for i in range(VOCABULARY - n))]
        elif key == "tokenizer.ggml.token_type":
            value = [*value, *[3] * (VOCABULARY - n)]
        kinds = field.types
        writer.add_key_value(key, value, kinds[0], kinds[-1] if kinds[0] == GGUFValueType.ARRAY else None)
    for tensor in reader.tensors:
        data = np.array(tensor.data)
        if tensor.name in ("token_embd.weight", "output.weight"):
            data = np.concatenate([data, np.repeat(data[1:2], VOCABULARY - n, axis=0)])  # like the mask's row: unlikely
        writer.add_tensor(tensor.name, data, raw_dtype=tensor.tensor_type)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    checkpoint = folder / "wide-drafter"
    checkpoint.mkdir()
    config = json.loads((pair.drafter / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, "vocab_size": VOCABULARY}))
    widen_codebooks(pair.drafter / "model.safetensors", checkpoint / "model.safetensors", n)
    return target, drafter_of(folder, checkpoint, target)


def widen_codebooks(source: Path, output: Path, n: int) -> None:
    """Copy a safetensors file with the selector's codebooks filled up from `n` rows to VOCABULARY by zeros."""
    data = source.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header, data = json.loads(data[8 : 8 + length]), data[8 + length :]
    header.pop("__metadata__", None)
    parts, at = [], 0
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        part = data[start:end]
        if name.endswith("codebook"):
            part += bytes(len(part) // n * (VOCABULARY - n))
            entry["shape"][0] = VOCABULARY
        entry["data_offsets"] = [at, at := at + len(part)]
        parts.append(part)
    encoded = json.dumps(header).encode()
    output.write_bytes(struct.pack("<Q", len(encoded)) + encoded + b"".join(parts))


if __name__ == "__main__":
    sys.exit(main())
