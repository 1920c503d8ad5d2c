"""Which tensors of a drafter bear rounding? Accepted length of the demo pair, one group of tensors rounded at a time.

The demo drafter's rows (64, 288, 384, 864 values) do not hold K-quant blocks of 256, so its tensors are cut into
rows of 256 values, quantised by llama.cpp, and read back into an F32 file of the old shapes: the weights carry the
rounding that a drafter of published size gets, while the arithmetic stays F32. Every row of the table drafts after
the same prompts as the unrounded drafter; the interval says what the choice of prompts alone would change. The rows
"as converted" are the demo drafter's own files, with the types that its rows do hold, arithmetic included.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
from gguf import GGUFWriter
from gguf.constants import GGMLQuantizationType, LlamaFileType
from gguf.quants import dequantize
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from dflash2.converter import convert
from dflash2.demo import demo_pair
from dflash2.gguf_info import GGUFInfo, TensorInfo, read_gguf_info
from dflash2.native import quantize_gguf
from dflash2.runtime import DFlashLlama

GROUPS = {
    "fc": ("fc.weight",),
    "selector codebooks": ("selector_predecessor.weight", "selector_successor.weight"),
    "selector_hidden": ("selector_hidden.weight",),
    "conv_proj": ("blk.*_conv_proj.weight",),
    "attn_q": ("blk.*.attn_q.weight",),
    "attn_k": ("blk.*.attn_k.weight",),
    "attn_v": ("blk.*.attn_v.weight",),
    "attn_output": ("blk.*.attn_output.weight",),
    "ffn_gate, ffn_up": ("blk.*.ffn_gate.weight", "blk.*.ffn_up.weight"),
    "ffn_down": ("blk.*.ffn_down.weight",),
}
GROUP_TYPES = ("Q8_0", "Q4_K", "IQ3_S", "Q2_K")
FILE_TYPES = ("Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q4_K_S", "IQ4_XS", "Q4_0", "Q3_K_M", "IQ3_S", "Q2_K")
# Groups that get more bits than the file's own mixture gives them, to see what that brings back.
SPARED = {
    "codebooks": ("selector codebooks",),
    "fc": ("fc",),
    "selector, fc": ("selector codebooks", "selector_hidden", "fc"),
    "selector, fc, conv_proj": ("selector codebooks", "selector_hidden", "fc", "conv_proj"),
    "attn_k, attn_v": ("attn_k", "attn_v"),
}
SPARED_IN = {"Q4_K_M": "Q8_0", "Q3_K_M": "Q4_K", "IQ3_S": "Q4_K", "Q2_K": "Q4_K"}
WHOLE, CONVERTED, NOTHING = "whole file", "as converted", "-"
BLOCK = 256
RESAMPLES = 2000


@dataclass(frozen=True)
class Case:
    """What is rounded to `type`, but for the groups `spared`, which are rounded to `spared_type`."""

    what: str
    type: str
    spared: str = NOTHING
    spared_type: str = "Q8_0"

    @property
    def but(self) -> str:
        return NOTHING if self.spared == NOTHING else f"{self.spared}: {self.spared_type}"


@dataclass(frozen=True)
class Counts:
    """Cycles and accepted draft tokens, per prompt."""

    cycles: np.ndarray
    accepted: np.ndarray
    tokens: tuple[tuple[int, ...], ...]

    @property
    def accepted_length(self) -> float:
        return 1 + float(self.accepted.sum() / self.cycles.sum())


def main(argv: list[str] | None = None) -> int:
    """Measure, print the table, write the JSON."""
    options = parse(argv)
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(options, Path(folder), console)
    console.print(table(rows))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=None, help="how many (default: all 48)")
    parser.add_argument("--tokens", type=int, default=200, help="new tokens per prompt")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases whose name holds this text")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers as JSON")
    return parser.parse_args(argv)


def cases() -> Iterator[Case]:
    for group in GROUPS:
        yield from (Case(group, name) for name in GROUP_TYPES)
    for name in FILE_TYPES:
        yield Case(WHOLE, name)
        if name in SPARED_IN:
            yield from (Case(WHOLE, name, spared, SPARED_IN[name]) for spared in SPARED)
    yield from (Case(CONVERTED, name) for name in FILE_TYPES)


def measure(options: argparse.Namespace, folder: Path, console: Console) -> list[dict]:
    pair = demo_pair()
    base = folder / "f32.gguf"
    convert(pair.drafter, pair.target, base, outtype="f32")
    chosen = [case for case in cases() if options.only in f"{case.what} {case.type} {case.but}"]
    rounding = Rounding(base, folder)
    converted = folder / "converted.gguf"
    rows = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("unrounded", total=len(chosen) + 1)
        unrounded = draft(pair.target, base, pair.prompts[: options.prompts], options)
        for case in chosen:
            progress.update(task, advance=1, description=f"{case.what} {case.type}")
            if case.what == CONVERTED:
                convert(pair.drafter, pair.target, converted, outtype=case.type)
                drafter, bits = converted, bits_per_weight(read_gguf_info(converted))
            else:
                drafter, bits = rounding.apply(case)
            counts = draft(pair.target, drafter, pair.prompts[: options.prompts], options)
            rows.append(compared(case, bits, counts, unrounded))
    return rows


def draft(target: Path, drafter: Path, prompts: Sequence[str], options: argparse.Namespace) -> Counts:
    cycles, accepted, texts = [], [], []
    kwargs = {"n_ctx": 512, "n_threads": options.threads, "n_threads_batch": options.threads, "verbose": False}
    # As every measurement of the demo pair: with this cache the target's logits do not depend on the batch.
    cache = {"type_k": GGMLQuantizationType.Q8_0, "type_v": GGMLQuantizationType.Q8_0}
    with closing(DFlashLlama(target, drafter, depth=None, auto_disable=False, **kwargs, **cache)) as llm:
        for prompt in prompts:
            llm.reset()
            llm.reset_stats()
            stream = llm.generate(llm.tokenize(prompt.encode()), temp=0.0)
            texts.append(tuple(next(stream) for _ in range(options.tokens)))
            stream.close()
            cycles.append(llm.stats.cycles)
            accepted.append(llm.stats.accepted)
    return Counts(np.array(cycles), np.array(accepted), tuple(texts))


class Rounding:
    """F32 copies of one drafter, some of its matrices rounded as llama.cpp's quantiser rounds them."""

    def __init__(self, base: Path, folder: Path) -> None:
        self._base, self._info = base, read_gguf_info(base)
        self._rows, self._quantised, self._output = (folder / f"{name}.gguf" for name in ("rows", "quantised", "out"))
        self._matrices = [t for t in self._info.tensors if is_matrix(t)]
        write_rows(self._rows, self._info, self._matrices)

    def apply(self, case: Case) -> tuple[Path, float]:
        """The drafter of `case`, overwritten by the next call, and the bits per weight of what is rounded."""
        if case.what == WHOLE:
            file_type = LlamaFileType[f"MOSTLY_{case.type}"]
            spared = [name for group in SPARED.get(case.spared, ()) for name in self._names(group)]
            types = [(name, GGMLQuantizationType[case.spared_type]) for name in spared]
            group = {t.name for t in self._matrices}
        else:
            file_type = LlamaFileType.MOSTLY_Q8_0
            group = set(self._names(case.what))
            wanted = GGMLQuantizationType[case.type]
            types = [(t.name, wanted if t.name in group else GGMLQuantizationType.F32) for t in self._matrices]
        quantize_gguf(self._rows, self._quantised, file_type=file_type, tensor_types=types)
        quantised = read_gguf_info(self._quantised)
        shutil.copyfile(self._base, self._output)
        with self._output.open("rb+") as file:
            for tensor in self._matrices:
                stored = quantised.tensor(tensor.name)
                values = dequantize(read_bytes(stored, self._quantised), GGMLQuantizationType[stored.type_name])
                file.seek(tensor.offset)
                file.write(np.ascontiguousarray(values, np.float32).tobytes())
        return self._output, bits_per_weight(quantised, group)

    def _names(self, group: str) -> list[str]:
        return [t.name for t in self._matrices if any(fnmatchcase(t.name, pattern) for pattern in GROUPS[group])]


def bits_per_weight(info: GGUFInfo, names: Collection[str] | None = None) -> float:
    """Of the matrices called `names`, or of all."""
    chosen = [t for t in info.tensors if is_matrix(t) and (names is None or t.name in names)]
    return 8 * sum(t.n_bytes for t in chosen) / sum(math.prod(t.shape) for t in chosen)


def is_matrix(tensor: TensorInfo) -> bool:
    return len(tensor.shape) == 2 and tensor.name.endswith(".weight")


def write_rows(path: Path, info: GGUFInfo, matrices: Sequence[TensorInfo]) -> None:
    """The same metadata and values; every matrix in rows of 256."""
    writer = GGUFWriter(path, info.architecture)
    for key, value in info.metadata.items():
        if key != "general.architecture" and not key.startswith("tokenizer."):
            kind = info.value_types[key]
            writer.add_key_value(key, list(value) if isinstance(value, tuple) else value, kind.kind, kind.element)
    for tensor in matrices:
        writer.add_tensor(tensor.name, read_bytes(tensor, info.path).view(np.float32).reshape(-1, BLOCK))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_bytes(tensor: TensorInfo, path: Path) -> np.ndarray:
    """The tensor's bytes, one array row per row of a matrix."""
    data = np.fromfile(path, np.uint8, tensor.n_bytes, offset=tensor.offset)
    return data.reshape(tensor.shape[1], -1)


def compared(case: Case, bits: float, counts: Counts, unrounded: Counts) -> dict:
    low, high = interval(counts, unrounded)
    return {
        "rounded": case.what,
        "type": case.type,
        "but": case.but,
        "bits_per_weight": round(bits, 2),
        "prompts": len(counts.cycles),
        "accepted_length": round(counts.accepted_length, 4),
        "unrounded": round(unrounded.accepted_length, 4),
        "difference": round(counts.accepted_length - unrounded.accepted_length, 4),
        "interval": [round(low, 4), round(high, 4)],
        "same_output": sum(a == b for a, b in zip(counts.tokens, unrounded.tokens, strict=True)),
    }


def interval(counts: Counts, unrounded: Counts) -> tuple[float, float]:
    """95% of the difference when the prompts are drawn again, both drafters on the same ones."""
    random = np.random.default_rng(0)
    drawn = random.integers(0, len(counts.cycles), (RESAMPLES, len(counts.cycles)))
    lengths = [c.accepted[drawn].sum(1) / c.cycles[drawn].sum(1) for c in (counts, unrounded)]
    low, high = np.quantile(lengths[0] - lengths[1], (0.025, 0.975))
    return float(low), float(high)


def table(rows: Sequence[dict]) -> Table:
    result = Table("rounded", "to", "but", "bits/weight", "L", "difference", "95% interval", "same output")
    for row in rows:
        low, high = row["interval"]
        result.add_row(
            row["rounded"],
            row["type"],
            row["but"],
            f"{row['bits_per_weight']:.2f}",
            f"{row['accepted_length']:.3f}",
            f"{row['difference']:+.3f}",
            f"{low:+.3f} {high:+.3f}",
            f"{row['same_output']}/{row['prompts']}",
        )
    return result


if __name__ == "__main__":
    sys.exit(main())
