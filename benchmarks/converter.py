"""The converter against `cp` and against upstream's converter, on a checkpoint of the 27B drafter's exact geometry.

Every figure is a whole process: wall time and peak resident memory. The programs take turns, so that what else the
machine does falls on all of them. Upstream is spared the tokenizer, which we write for 248,320 tokens.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGUFWriter
from rich.console import Console
from rich.table import Table

from dflash2.cache import cache_folder
from dflash2.patches import source

ROOT = Path(__file__).resolve().parents[1]
UPSTREAM = ROOT / "tests" / "upstream_convert.py"

MOST_OF_CP = 1.5  # BF16, wall time
LEAST_GAIN_OVER_UPSTREAM = 1.5  # Q8_0, wall time
MOST_MEGABYTES = 600

HIDDEN, FEED_FORWARD, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 5120, 17408, 5, 32, 8, 128
VOCAB, RANK, MASK, TAPS = 248320, 256, 248070, [5, 19, 33, 47, 61]
CONFIG = {
    "architectures": ["DFlash2DraftModel"],
    "attention_bias": False,
    "dflash_config": {
        "block_size": 8,
        "conv_group_size": 16,
        "conv_kernel_size": 2,
        "mask_token_id": MASK,
        "selector_rank": RANK,
        "selector_top_k": 16,
        "target_layer_ids": TAPS,
    },
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": FEED_FORWARD,
    "is_causal": False,
    "layer_types": ["sliding_attention"] * LAYERS,
    "max_position_embeddings": 262144,
    "model_type": "qwen3",
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": KV_HEADS,
    "num_target_layers": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000000,
    "sliding_window": 2048,
    "tie_word_embeddings": False,
    "use_sliding_window": True,
    "vocab_size": VOCAB,
}
PUBLISHED_BYTES = 3_848_817_896


@dataclass(frozen=True)
class Run:
    """One process: wall time in seconds, peak resident memory in bytes."""

    seconds: float
    peak_bytes: int


def main(argv: list[str] | None = None) -> int:
    """Measure, print the table; with --check, 1 when a bar is missed."""
    options = parse(argv)
    options.work.mkdir(parents=True, exist_ok=True)
    checkpoint, target = options.work / "drafter", options.work / "target.gguf"
    if not (checkpoint / "config.json").exists():
        elsewhere(make_checkpoint, checkpoint)
    if not target.exists():
        elsewhere(make_target, target)
    programs = commands(checkpoint, target, options.work)
    runs: dict[str, list[Run]] = {name: [] for name in programs}
    for _ in range(options.runs):
        for name, command in programs.items():
            runs[name].append(measure(command, options.work / f"{name}.out"))
    medians = {
        name: Run(statistics.median(r.seconds for r in done), max(r.peak_bytes for r in done))
        for name, done in runs.items()
    }
    console = Console()
    console.print(table(runs, medians))
    for text in (bars := missed(medians)):
        console.print(f"missed: {text}")
    if options.json:
        options.json.write_text(json.dumps(as_json(runs, medians), indent=2) + "\n")
    return int(options.check and bool(bars))


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3, help="turns of every program (default: 3)")
    parser.add_argument(
        "--work",
        type=Path,
        default=cache_folder("benchmarks") / "converter",
        help="folder for the checkpoint and the outputs, about 12 GB (default: in the cache)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers as JSON")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a bar is missed")
    return parser.parse_args(argv)


def commands(checkpoint: Path, target: Path, work: Path) -> dict[str, list[str]]:
    """Program of every row; each writes the file named after its row."""
    programs = {"cp": ["cp", str(checkpoint / "model.safetensors"), str(work / "cp.out")]}
    convert = [str(Path(sys.executable).with_name("dflash2-convert")), str(checkpoint), "--target", str(target)]
    for kind in ("bf16", "q8_0"):
        ours, theirs = f"ours {kind}", f"upstream {kind}"
        programs[ours] = [*convert, "-o", str(work / f"{ours}.out"), "--outtype", kind]
        order = json.dumps([str(checkpoint), "", str(work / f"{theirs}.out"), kind])
        programs[theirs] = ["sh", "-c", 'echo "$0" | "$@"', order, sys.executable, str(UPSTREAM), str(source())]
    return programs


def measure(command: list[str], output: Path) -> Run:
    """Run a program that writes `output`, which is new each time and removed afterwards."""
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - begin
    if status or output.stat().st_size < PUBLISHED_BYTES // 2:
        raise SystemExit(f"{command[0]} failed with status {status}")
    output.unlink()
    return Run(seconds, usage.ru_maxrss * 1024)


def elsewhere(function: Callable[[Path], None], path: Path) -> None:
    """Run in another process: what this one ever held would count as the peak of the programs it starts."""
    process = multiprocessing.get_context("spawn").Process(target=function, args=(path,))
    process.start()
    process.join()


def make_checkpoint(folder: Path) -> None:
    """Random BF16 weights of every published shape in one safetensors file."""
    folder.mkdir(parents=True, exist_ok=True)
    shapes = tensor_shapes()
    header, position = {}, 0
    for name, shape in shapes.items():
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [position, position + size]}
        position += size
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    random = np.random.default_rng(0)
    some = (random.normal(0, 0.02, 32 << 20).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for shape in shapes.values():
            left = int(np.prod(shape))
            while left:
                part = some[int(random.integers(0, 1024)) :][:left]
                file.write(part.tobytes())
                left -= len(part)
    (folder / "config.json").write_text(json.dumps(CONFIG))


def tensor_shapes() -> dict[str, list[int]]:
    query, key = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    kernels = 2 * 2 * (HIDDEN // 16)
    shapes: dict[str, list[int]] = {
        "fc.weight": [HIDDEN, len(TAPS) * HIDDEN],
        "hidden_norm.weight": [HIDDEN],
        "norm.weight": [HIDDEN],
        "candidate_selector.predecessor_codebook": [VOCAB, RANK],
        "candidate_selector.successor_codebook": [VOCAB, RANK],
        "candidate_selector.hidden_projection.weight": [RANK, HIDDEN],
    }
    for layer in range(LAYERS):
        names = {
            "input_layernorm.weight": [HIDDEN],
            "post_attention_layernorm.weight": [HIDDEN],
            "self_attn.q_proj.weight": [query, HIDDEN],
            "self_attn.k_proj.weight": [key, HIDDEN],
            "self_attn.v_proj.weight": [key, HIDDEN],
            "self_attn.o_proj.weight": [HIDDEN, query],
            "self_attn.q_norm.weight": [HEAD_DIM],
            "self_attn.k_norm.weight": [HEAD_DIM],
            "mlp.gate_proj.weight": [FEED_FORWARD, HIDDEN],
            "mlp.up_proj.weight": [FEED_FORWARD, HIDDEN],
            "mlp.down_proj.weight": [HIDDEN, FEED_FORWARD],
            "attention_conv.base_kernel": [2, 2, HIDDEN],
            "attention_conv.kernel_projection.weight": [kernels, HIDDEN],
            "mlp_conv.base_kernel": [2, 2, HIDDEN],
            "mlp_conv.kernel_projection.weight": [kernels, HIDDEN],
        }
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in names.items()}
    return shapes


def make_target(path: Path) -> None:
    """A target's GGUF header: sizes and a tokenizer of 248,320 tokens with merges, no weights."""
    writer = GGUFWriter(path, "qwen35")
    writer.add_block_count(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_context_length(262144)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen35")
    writer.add_token_list([f"token{number}" for number in range(VOCAB)])
    writer.add_token_types([1] * VOCAB)
    writer.add_token_merges([f"to ken{number}" for number in range(VOCAB - 300)])
    writer.add_rope_dimension_sections([11, 11, 10, 0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()


def table(runs: dict[str, list[Run]], medians: dict[str, Run]) -> Table:
    made = Table("program", "seconds (median)", "seconds (all)", "peak MB", "over cp")
    for name, median in medians.items():
        every = " ".join(f"{run.seconds:.1f}" for run in runs[name])
        ratio = median.seconds / medians["cp"].seconds
        made.add_row(name, f"{median.seconds:.1f}", every, f"{median.peak_bytes / 1e6:.0f}", f"{ratio:.2f}")
    return made


def missed(medians: dict[str, Run]) -> list[str]:
    """The bars of the issue that these figures do not reach."""
    over_cp = medians["ours bf16"].seconds / medians["cp"].seconds
    gain = medians["upstream q8_0"].seconds / medians["ours q8_0"].seconds
    megabytes = max(medians[name].peak_bytes for name in ("ours bf16", "ours q8_0")) / 1e6
    bars = [
        (over_cp <= MOST_OF_CP, f"BF16 takes {over_cp:.2f} times as long as cp, at most {MOST_OF_CP} wanted"),
        (
            gain >= LEAST_GAIN_OVER_UPSTREAM,
            f"Q8_0 is {gain:.2f} times as fast as upstream, {LEAST_GAIN_OVER_UPSTREAM} wanted",
        ),
        (megabytes <= MOST_MEGABYTES, f"{megabytes:.0f} MB resident, at most {MOST_MEGABYTES} wanted"),
    ]
    return [text for reached, text in bars if not reached]


def as_json(runs: dict[str, list[Run]], medians: dict[str, Run]) -> dict[str, object]:
    return {
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "checkpoint_bytes": PUBLISHED_BYTES,
        "rows": {
            name: {
                "seconds": [round(run.seconds, 2) for run in runs[name]],
                "median_seconds": round(median.seconds, 2),
                "peak_megabytes": round(median.peak_bytes / 1e6),
            }
            for name, median in medians.items()
        },
    }


if __name__ == "__main__":
    sys.exit(main())
