"""What a head trimmed to N tokens costs and saves: accepted length on the demo pair, time of a pass at the 27B's size.

The demo pair: the same prompts with every drafter, token frequencies from the standard library of the running Python,
without the files that the prompts are cut from. The 27B head: a drafter of one small layer with the vocabulary, hidden
size, block and selector of the published Qwen3.8-27B drafter and random weights, so that nearly all of a pass is its
head; all sizes take turns. Times are the least seen: what else a machine does only adds to them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

import numpy as np
from demo_pair import machine
from gguf import GGUFWriter
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import quantize
from rich.console import Console
from rich.table import Table
from safetensors.numpy import save_file

from dflash2 import native
from dflash2.converter import DraftVocabulary, convert
from dflash2.demo import demo_pair
from dflash2.evidence import Bench, PromptRuns, bench
from dflash2.native import Context, ContextOptions, Model, Placement
from dflash2.runtime.draft import draft

DEMO_SIZES = (384, 256, 192, 128, 64)
LARGE_SIZES = (131072, 65536, 32768, 16384)
VOCAB, HIDDEN, BLOCK, RANK, TOP_K = 248320, 5120, 8, 256, 16
FEED_FORWARD, HEADS, HEAD_DIM, MASK_TOKEN = 256, 2, 128, 248070
HEAD_TYPES = {"q8_0": GGMLQuantizationType.Q8_0, "q6_k": GGMLQuantizationType.Q6_K}
_PROMPTS_PER_TURN = 4
_DISTINCT_ROWS = 4096  # random rows of the head; more would only take longer to make


@dataclass(frozen=True)
class DemoRow:
    """One drafter on the demo pair; `size` None: the head is the target's. `draft_ms` per cycle, of one prompt."""

    size: int | None
    covered: float
    equal: int
    prompts: int
    accepted_length: float
    draft_ms: float


@dataclass(frozen=True)
class PassRow:
    """Least time of one draft pass of 8 rows with a head of `size` tokens."""

    head_type: str
    size: int
    head_megabytes: float
    pass_ms: float


def main(argv: list[str] | None = None) -> int:
    """Measure and print both tables; 1 if an output changed."""
    options = parse(argv)
    console = Console()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        demo = [] if options.skip_demo else list(measure_demo(options, Path(folder)))
        if demo:
            console.print(demo_table(demo))
        large = [row for kind in options.head for row in measure_passes(options, Path(folder), kind)]
        if large:
            console.print(pass_table(large))
    if options.json:
        numbers = {"machine": machine(options), "demo": list(map(asdict, demo)), "passes": list(map(asdict, large))}
        options.json.write_text(json.dumps(numbers, indent=2) + "\n")
    return int(any(row.equal < row.prompts for row in demo))


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=40, help="demo prompts")
    parser.add_argument("--tokens", type=int, default=200, help="new tokens per demo prompt")
    parser.add_argument("--skip-demo", action="store_true", help="only the 27B head")
    parser.add_argument("--head", nargs="*", choices=HEAD_TYPES, default=["q8_0"], help="types of the 27B head")
    parser.add_argument("--passes", type=int, default=20, help="passes per size of the 27B head")
    parser.add_argument("--folder", type=Path, help="where up to 8 GB of files go for a while")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers as JSON")
    return parser.parse_args(argv)


def measure_demo(options: argparse.Namespace, folder: Path) -> Iterator[DemoRow]:
    pair = demo_pair()
    text = folder / "frequencies.txt"
    text.write_text(training_text(pair.target.parent / "prompts.json"), encoding="utf-8")
    drafters, covered = {}, {}
    for size in (None, *DEMO_SIZES):
        vocabulary = None if size is None else DraftVocabulary(size, (text,))
        done = convert(pair.drafter, pair.target, folder / f"demo-{size}.gguf", draft_vocab=vocabulary)
        drafters[size] = done.output
        covered[size] = 1.0 if size is None else float(re.findall(r"([\d.]+)% of those", done.notes[0])[0]) / 100
    runs: dict[int | None, list[PromptRuns]] = {size: [] for size in drafters}
    prompts = pair.prompts[: options.prompts]
    cache = GGMLQuantizationType.Q8_0  # as in demo_pair.py: no near-ties
    kwargs = {"n_ctx": 512, "n_threads": options.threads, "n_threads_batch": options.threads}
    for first in range(0, len(prompts), _PROMPTS_PER_TURN):
        turn = prompts[first : first + _PROMPTS_PER_TURN]
        for size, path in drafters.items():
            done_turn = bench(pair.target, path, turn, n_tokens=options.tokens, type_k=cache, type_v=cache, **kwargs)
            runs[size] += done_turn.runs
    for size, all_runs in runs.items():
        result = Bench(tuple(all_runs))
        draft_ms = 1000 * min(run.drafted.stats.seconds["draft"] / run.drafted.stats.cycles for run in all_runs)
        yield DemoRow(size, covered[size], result.n_equal, len(prompts), result.accepted_length, draft_ms)


def training_text(prompts: Path) -> str:
    """The standard library's code, as the demo pair was trained on, without the files of the prompts."""
    left_out = {prompt["file"] for prompt in json.loads(prompts.read_text(encoding="utf-8"))}
    root = Path(sysconfig.get_path("stdlib"))
    files = [path for path in sorted(root.glob("*.py")) if path.name not in left_out]
    return "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in files)


def measure_passes(options: argparse.Namespace, folder: Path, kind: str) -> Iterator[PassRow]:
    target, checkpoint = folder / f"target-{kind}.gguf", folder / "checkpoint"
    write_target(target, HEAD_TYPES[kind])
    if not checkpoint.exists():
        write_checkpoint(checkpoint)
    counts = folder / "counts.txt"
    counts.write_text("".join(f"{token} 1\n" for token in range(0, VOCAB, 1 + VOCAB // max(LARGE_SIZES))))
    block = np.full(BLOCK, MASK_TOKEN, np.int32)
    block[0] = 1000
    native.silence()
    with ExitStack() as stack:
        drafters = {}
        for size in (VOCAB, *LARGE_SIZES):
            vocabulary = None if size == VOCAB else DraftVocabulary(size, (counts,))
            path = folder / f"drafter-{size}.gguf"
            convert(checkpoint, target, path, outtype="q8_0", embed_target_head=True, draft_vocab=vocabulary)
            model = stack.enter_context(closing(Model(path, Placement())))
            drafters[size] = stack.enter_context(closing(open_drafter(model, options.threads)))
            path.unlink()  # stays readable while it is mapped
        target.unlink()
        times: dict[int, list[float]] = {size: [] for size in drafters}
        for _ in range(options.passes + 1):
            for size, drafter in drafters.items():
                begin = perf_counter()
                draft(drafter, block, 0, lattice=True)
                times[size].append(perf_counter() - begin)
                drafter.truncate(0)
    for size, seconds in times.items():
        block_size, block_bytes = GGML_QUANT_SIZES[HEAD_TYPES[kind]]
        megabytes = size * HIDDEN / block_size * block_bytes / 1e6
        yield PassRow(kind, size, megabytes, 1000 * min(seconds[1:]))


def open_drafter(model: Model, threads: int) -> Context:
    """A context without a target: the drafter carries embeddings and head."""
    options = ContextOptions(n_ctx=64, n_batch=BLOCK, n_ubatch=BLOCK, n_threads=threads, n_threads_batch=threads)
    context = Context.open(model, options, feature_width=HIDDEN)
    context.set_causal(False)
    context.output_lattice()
    return context


def write_target(path: Path, kind: GGMLQuantizationType) -> None:
    """Only what the converter reads of a target: sizes, tokenizer, embeddings that are also the head."""
    writer = GGUFWriter(path, "qwen3")
    writer.add_block_count(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(["<|endoftext|>", "\u010a", *(f"t{i}" for i in range(2, VOCAB))])
    writer.add_token_types([3] + [1] * (VOCAB - 1))
    writer.add_eos_token_id(0)
    writer.add_token_merges(["t 1"])
    rows = np.resize(random_rows(kind), (VOCAB, HIDDEN // GGML_QUANT_SIZES[kind][0] * GGML_QUANT_SIZES[kind][1]))
    writer.add_tensor("token_embd.weight", rows, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def random_rows(kind: GGMLQuantizationType) -> np.ndarray:
    """Bytes of some rows of the type; of one that gguf-py cannot write, random codes with a small scale."""
    random = np.random.default_rng(0)
    if kind is GGMLQuantizationType.Q8_0:
        values = random.normal(0, HIDDEN**-0.5, (_DISTINCT_ROWS, HIDDEN)).astype(np.float32)
        return quantize(values, kind).view(np.uint8)
    block, block_bytes = GGML_QUANT_SIZES[kind]
    data = random.integers(0, 256, (_DISTINCT_ROWS * HIDDEN // block, block_bytes), np.uint8)
    data[:, -2:] = np.array([1e-5], np.float16).view(np.uint8)
    return data.reshape(_DISTINCT_ROWS, -1)


def write_checkpoint(folder: Path) -> None:
    folder.mkdir()
    random = np.random.default_rng(1)
    query, groups = HEADS * HEAD_DIM, HIDDEN // 16
    layer = "layers.0."
    shapes = {
        "fc.weight": (HIDDEN, HIDDEN),
        "candidate_selector.predecessor_codebook": (VOCAB, RANK),
        "candidate_selector.successor_codebook": (VOCAB, RANK),
        "candidate_selector.hidden_projection.weight": (RANK, HIDDEN),
        **{f"{layer}self_attn.{name}_proj.weight": (query, HIDDEN) for name in "qkv"},
        f"{layer}self_attn.o_proj.weight": (HIDDEN, query),
        f"{layer}mlp.gate_proj.weight": (FEED_FORWARD, HIDDEN),
        f"{layer}mlp.up_proj.weight": (FEED_FORWARD, HIDDEN),
        f"{layer}mlp.down_proj.weight": (HIDDEN, FEED_FORWARD),
        **{f"{layer}{part}_conv.base_kernel": (2, 2, HIDDEN) for part in ("attention", "mlp")},
        **{f"{layer}{part}_conv.kernel_projection.weight": (4 * groups, HIDDEN) for part in ("attention", "mlp")},
    }
    norms = ("hidden_norm", "norm", f"{layer}input_layernorm", f"{layer}post_attention_layernorm")
    tensors = {
        name: (random.standard_normal(shape, np.float32) / 64).astype(np.float16) for name, shape in shapes.items()
    }
    tensors |= {f"{name}.weight": np.ones(HIDDEN, np.float16) for name in norms}
    tensors |= {f"{layer}self_attn.{name}_norm.weight": np.ones(HEAD_DIM, np.float16) for name in "qk"}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config()))


def config() -> dict:
    return {
        "architectures": ["DFlash2DraftModel"],
        "block_size": BLOCK,
        "dflash_config": {
            "mask_token_id": MASK_TOKEN,
            "target_layer_ids": [5],
            "conv_kernel_size": 2,
            "conv_group_size": 16,
            "selector_rank": RANK,
            "selector_top_k": TOP_K,
        },
        "head_dim": HEAD_DIM,
        "hidden_size": HIDDEN,
        "intermediate_size": FEED_FORWARD,
        "is_causal": False,
        "layer_types": ["full_attention"],
        "max_position_embeddings": 4096,
        "num_attention_heads": HEADS,
        "num_hidden_layers": 1,
        "num_key_value_heads": HEADS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e7,
        "vocab_size": VOCAB,
    }


def demo_table(rows: list[DemoRow]) -> Table:
    table = Table("draft vocabulary", "of the text", "equal", "L", "draft ms", title="demo pair")
    for row in rows:
        table.add_row(
            "the target's head" if row.size is None else str(row.size),
            f"{100 * row.covered:.2f}%",
            f"{row.equal}/{row.prompts}",
            f"{row.accepted_length:.2f}",
            f"{row.draft_ms:.3f}",
        )
    return table


def pass_table(rows: list[PassRow]) -> Table:
    table = Table("head", "tokens", "MB", "pass ms", "of whole", title=f"one layer and a head of {HIDDEN} columns")
    whole = {row.head_type: row.pass_ms for row in rows if row.size == VOCAB}
    for row in rows:
        table.add_row(
            row.head_type,
            str(row.size),
            f"{row.head_megabytes:.0f}",
            f"{row.pass_ms:.1f}",
            f"{row.pass_ms / whole[row.head_type]:.2f}",
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
