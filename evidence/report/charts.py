"""Pictures of results as numbers: which series each shows, before anything is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash2.evidence.compare import PLAIN
from dflash2.evidence.results import Result

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Series:
    """A line through (x, y), or a part of every bar: its length `y` by bar."""

    name: str
    y: tuple[float, ...]
    x: tuple[float, ...] = ()


@dataclass(frozen=True)
class Chart:
    """One picture.

    Attributes:
        name: for a file name.
        title, x_label, y_label: in words; the values of bars are along x.
        series: lines, or parts of bars.
        bars: names of the bars; empty for lines.
        top: where the axis of values ends; None: at the largest value.
    """

    name: str
    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    bars: tuple[str, ...] = ()
    top: float | None = None


def charts(result: Result) -> tuple[Chart, ...]:
    """The pictures of a result; raises KeyError, TypeError or ValueError where its rows are not what is written."""
    of_command = {"analyze": _of_analysis, "bench": _of_bench}.get(result.command)
    return () if of_command is None else tuple(of_command(result))


def of_kind(result: Result, kind: str) -> list[Row]:
    """The rows of one kind, in their order."""
    return [row for row in result.rows if row.get("kind") == kind]


def _of_analysis(result: Result) -> list[Chart]:
    positions, bins = of_kind(result, "position"), of_kind(result, "bin")
    recall = tuple(
        _line(f"position {row['position']}", range(1, len(row["recall"]) + 1), row["recall"]) for row in positions
    )
    at = [row["position"] for row in positions]
    acceptance = tuple(
        _line(name, at, [row[count] / row["n"] if row["n"] else None for row in positions])
        for name, count in (("path right", "path_right"), ("top-1 right", "top_1_right"))
    )
    calibration = (
        _line("right", [row["mean_q"] for row in bins], [row["right"] for row in bins]),
        _line("as q says", (0, 1), (0, 1)),
    )
    return [
        Chart("recall", "Recall by number of candidates", "candidates", "share of anchors", recall, top=1),
        Chart("acceptance", "Acceptance per position, the path right so far", "position", "share", acceptance, top=1),
        Chart("calibration", "Calibration of q", "mean q", "share right", calibration, top=1),
    ]


def _of_bench(result: Result) -> list[Chart]:
    variants = of_kind(result, "variant")
    names = tuple(str(row["variant"]) for row in variants)
    found = []
    if variants:
        rates = (variants[0]["plain_tokens_per_second"], *(row["tokens_per_second"] for row in variants))
        speed = (Series("tokens/s", _numbers(rates)),)
        found.append(Chart("speed", "Tokens per second", "tokens/s", "", speed, (PLAIN, *names)))
    drafting = [row for row in variants if row["acceptance_at"]]
    if drafting:
        lines = tuple(
            _line(str(row["variant"]), range(1, len(row["acceptance_at"]) + 1), row["acceptance_at"])
            for row in drafting
        )
        title = "Acceptance per position, all before it accepted"
        found.append(Chart("acceptance", title, "position", "share", lines, top=1))
    timed = [row for row in variants if row["stage_ms"]]
    if timed:
        stages = list(dict.fromkeys(stage for row in timed for stage in row["stage_ms"]))
        parts = tuple(Series(stage, _numbers(row["stage_ms"].get(stage) for row in timed)) for stage in stages)
        bars = tuple(str(row["variant"]) for row in timed)
        found.append(Chart("cycle", "Where a cycle's time goes", "ms per cycle", "", parts, bars))
    return found


def _line(name: str, x: Sequence[float], y: Sequence[float | None]) -> Series:
    """A line through the points whose value is known."""
    points = [(float(at), float(value)) for at, value in zip(x, y, strict=True) if value is not None]
    return Series(name, tuple(value for _, value in points), tuple(at for at, _ in points))


def _numbers(values: Any) -> tuple[float, ...]:
    """Lengths of bars; what is not known has none."""
    return tuple(0.0 if value is None else float(value) for value in values)
