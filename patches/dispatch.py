"""The table that says which kernel multiplies a few rows with quantised weights: measured here, read by the library.

The library's side, the meaning of an entry and the format are in `patches/src/ggml/src/dflash2-dispatch.h`. A table is
of a build and a card: it lies beside the build's libraries, which read it whatever program loads them.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal

from dflash2.errors import BuildError

# The name by which the library looks for a table in its own folder.
TABLE = "dflash2-dispatch.txt"
# Built from patches/src/ggml/src/dflash2-measure.cpp, beside the library.
PROGRAM = "dflash2-measure"

# Rows that the kernel for few rows can take.
_MAX_ROWS = 8
# A switch of kernels has to be worth this share of the time: one kernel for all row counts keeps numbers more alike.
_WORTH = 0.02

Backend = Literal["cuda", "metal"]
Progress = Callable[[str, int], None]


@dataclass(frozen=True)
class Timing:
    """Microseconds of one product of `rows` rows with weights of `type`: `vector` with the kernel for few rows."""

    type: str
    rows: int
    vector: float
    matrix: float


@dataclass(frozen=True)
class Entry:
    """One line of the table: weights of `type` use the kernel for few rows up to `rows` of them, on one device."""

    backend: Backend
    device: str
    type: str
    rows: int

    def __str__(self) -> str:
        return f"{self.backend} {self.device} mul_mat {self.type} {self.rows}"


@dataclass(frozen=True)
class Measurement:
    """What was measured: the device's number in the table and its name, the times, and what follows from them."""

    device: str
    name: str
    timings: tuple[Timing, ...]
    entries: tuple[Entry, ...]

    def render(self) -> str:
        """The table as text, with the times that led to each entry as comments."""
        lines = [f"# {self.name}: microseconds of a product of 2 to {_MAX_ROWS} rows, kernel for few rows / for many"]
        by_type = {name: list(group) for name, group in groupby(self.timings, lambda timing: timing.type)}
        for entry in self.entries:
            times = " ".join(f"{t.vector:.0f}/{t.matrix:.0f}" for t in by_type[entry.type] if t.rows > 1)
            lines += [f"# {entry.type}: {times}", str(entry)]
        return "\n".join(lines) + "\n"


def measure(
    folder: Path,
    backend: Backend,
    output: Path | None = None,
    *,
    options: Sequence[str] = (),
    progress: Progress | None = None,
) -> Measurement:
    """Time both kernels on the card at hand, a few seconds, and write the table to `output`.

    `folder` holds the programs and libraries of a build; its file `TABLE`, the default, is what they use from then on.
    `options` go to `dflash2-measure`, whose source lists them. `progress(type, rows)` is called after every time.
    Raises BuildError if the program is not there or finds no card with a table.
    """
    program = folder / (PROGRAM + (".exe" if os.name == "nt" else ""))
    if not program.is_file():
        raise BuildError(f"There is no {PROGRAM} in {folder}; build it first.")
    measured = _read(_run([str(program), *options], progress), backend)
    output = output or folder / TABLE
    partial = output.with_name(output.name + ".partial")
    partial.write_text(measured.render())
    partial.replace(output)
    return measured


def choose(timings: Iterable[Timing]) -> int:
    """Rows up to which the kernel for few rows serves one type: the split with the least time over all row counts.

    No split at all, 8, unless it saves 2% or more.
    """
    by_rows = {timing.rows: timing for timing in timings if timing.rows > 1}
    totals = {
        split: sum(time.vector if rows <= split else time.matrix for rows, time in by_rows.items())
        for split in range(1, _MAX_ROWS + 1)
    }
    best = min(totals, key=lambda split: (totals[split], -split))
    return best if totals[best] < (1 - _WORTH) * totals[_MAX_ROWS] else _MAX_ROWS


def _run(command: Sequence[str], progress: Progress | None) -> list[list[str]]:
    """The program's lines, split at tabs."""
    lines = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        for line in process.stdout:
            lines.append(line.rstrip("\n").split("\t"))
            if progress is not None and lines[-1][0] == "time":
                progress(lines[-1][1], int(lines[-1][2]))
        said = process.stderr.read()
    if process.returncode:
        raise BuildError(f"The dispatch table could not be measured: {said.strip()[-500:]}")
    return lines


def _read(lines: list[list[str]], backend: Backend) -> Measurement:
    number, name = next((fields[1], fields[2]) for fields in lines if fields[0] == "device")
    device = "*" if number == "0" else number
    timings = tuple(
        Timing(fields[1], int(fields[2]), float(fields[3]), float(fields[4])) for fields in lines if fields[0] == "time"
    )
    grouped = groupby(timings, lambda timing: timing.type)
    entries = tuple(Entry(backend, device, weights, choose(group)) for weights, group in grouped)
    return Measurement(device, name, timings, entries)
