"""The convolution, the top-k and the selector of a draft pass, timed on a device of either build (patches_ops.cpp)."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from rich.table import Table

from dflash2.patches import source

SOURCE = Path(__file__).with_name("patches_ops.cpp")
N_CONV = 20  # of a draft pass: two sublayers, in and out, in five layers
# Kernels of ours whose runs the backend counts.
FUSED = {"cpu": ("conv", "top_k"), "cuda": ("conv", "top_k", "selector"), "hip": (), "vulkan": (), "metal": ()}
DEVICES = {"cpu": "CPU", "cuda": "CUDA0", "hip": "ROCm0", "vulkan": "Vulkan0", "metal": "MTL0"}


@dataclass(frozen=True)
class Operators:
    """Microseconds of one operation, medians of rounds in turns; the selector's with its top-k, patched build only."""

    stock_conv: float
    patched_conv: float
    stock_top_k: float
    patched_top_k: float
    patched_selector: float
    # The fewest runs of any fused kernel in the patched build; 0 if one of them was not used.
    kernel_runs: int

    @property
    def patched_us(self) -> float:
        """All of them in a draft pass of the patched build; projections and the gate's are not among them."""
        return N_CONV * self.patched_conv + self.patched_selector

    @property
    def top_k_gain(self) -> float:
        return self.stock_top_k / self.patched_top_k

    def rendered(self) -> dict:
        return {**asdict(self), "patched_us": self.patched_us, "top_k_gain": self.top_k_gain}

    def table(self) -> Table:
        shown = Table("operator, 27B geometry", "stock us", "patched us", "faster")
        for name, a, b in (
            ("convolution, 5120 x 8, 2 taps, groups of 16", self.stock_conv, self.patched_conv),
            ("TOP_K 16 of 248320 x 8", self.stock_top_k, self.patched_top_k),
        ):
            shown.add_row(name, f"{a:.1f}", f"{b:.1f}", f"{a / b:.1f}x")
        shown.add_row("selector, top-k included", "-", f"{self.patched_selector:.1f}", "")
        return shown


def operators(
    stock: Path, patched: Path, backend: str, *, threads: int, rounds: int = 5, repeats: int = 30
) -> Operators:
    """Times of the builds whose libraries lie in the folders `stock` and `patched`; needs a C++ compiler."""
    with tempfile.TemporaryDirectory() as folder:
        program = _compiled(Path(folder), patched)
        device = DEVICES[backend]
        taken: dict[str, list[dict[str, float]]] = {"stock": [], "lean": []}
        for _ in range(rounds):
            for graph, library in (("stock", stock), ("lean", patched)):
                command = [program, graph, str(threads), str(repeats), device]
                environment = {**os.environ, "LD_LIBRARY_PATH": str(library)}
                done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
                taken[graph].append(json.loads(done.stdout))
    times = {(graph, name): median(each[name] for each in taken[graph]) for graph in taken for name in taken[graph][0]}
    return Operators(
        *(times[graph, name] for name in ("conv", "top_k") for graph in ("stock", "lean")),
        patched_selector=times["lean", "selector"],
        kernel_runs=min((int(each[f"{name}_runs"]) for each in taken["lean"] for name in FUSED[backend]), default=0),
    )


def _compiled(folder: Path, libraries: Path) -> Path:
    program = folder / "patches_ops"
    command = [os.environ.get("CXX", "c++"), "-std=c++17", "-O2", f"-I{source() / 'ggml' / 'include'}", str(SOURCE)]
    linked = [f"-L{libraries}", f"-Wl,-rpath-link,{libraries}", "-lggml", "-lggml-cpu", "-lggml-base", "-ldl"]
    subprocess.run([*command, "-o", str(program), *linked], check=True)
    return program
