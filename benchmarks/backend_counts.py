"""What a program asks its backends for, counted from outside (backend_counts.c), on Linux."""

from __future__ import annotations

import mmap
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")
_LAYOUT = struct.Struct("=8Q")


@dataclass(frozen=True)
class Counts:
    """Between two moments: llama.cpp's graphs, CUDA graphs, kernels launched one by one, milliseconds of waiting.

    Waiting is the time in calls that wait for the GPU, or on a CPU the time in which the graphs are computed. What
    cannot be counted on this backend is None.
    """

    graphs: int | None = None
    cuda_graphs: int | None = None
    cuda_kernels: int | None = None
    wait_ms: float | None = None


class Counter:
    """Reads the counts of the programs that are started with its `environment`."""

    def __init__(self, library: Path | None, page: mmap.mmap | None, file: Path, backend: str) -> None:
        self._page, self._backend = page, backend
        counted = {"LD_PRELOAD": str(library), "DFLASH2_COUNTS": str(file)}
        self.environment = {} if page is None else counted

    def read(self) -> tuple[int, ...]:
        """All counts so far."""
        return () if self._page is None else _LAYOUT.unpack(self._page[: _LAYOUT.size])

    def between(self, before: tuple[int, ...], after: tuple[int, ...]) -> Counts:
        """What happened between two readings."""
        if not before:
            return Counts()
        graphs, graph_ns, cuda_graphs, kernels, wait_ns, *_ = (b - a for a, b in zip(before, after, strict=True))
        if self._backend == "cpu":
            return Counts(graphs, wait_ms=graph_ns / 1e6)
        # A statically linked CUDA runtime cannot be stood before.
        seen = self._backend == "cuda" and after[2] + after[3] > 0
        return Counts(graphs, cuda_graphs, kernels, wait_ns / 1e6) if seen else Counts(graphs)


@contextmanager
def counting(folder: Path, backend: str) -> Iterator[Counter]:
    """A counter for programs on `backend`, its files in `folder`; where nothing can be preloaded it counts nothing."""
    file, library = folder / "counts", folder / "backend_counts.so"
    if not sys.platform.startswith("linux"):
        yield Counter(None, None, file, backend)
        return
    compiler = os.environ.get("CC", "cc")
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"], check=True)
    file.write_bytes(bytes(_LAYOUT.size))
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), _LAYOUT.size, access=mmap.ACCESS_READ) as page:
        yield Counter(library, page, file, backend)
