"""What `dflash2 bench` shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from dflash2.commands.terminal import cell, console, errors

if TYPE_CHECKING:
    from dflash2.evidence import Bench, BenchComparison, Measured, MedianInterval, Memory


def show_measured(measured: Measured, memory: Memory | None) -> None:
    """Speed, accepted length and cost of a cycle of every variant; acceptance per position; where the time goes."""
    benches = measured.benches
    one = next(iter(benches.values()))
    speed = Table("", "equal", "L", "c(w)", "tokens/s", "L / c(w)", "median of the prompts' speedups")
    speed.add_row("no drafting", "", "1", "1", f"{one.plain_tokens_per_second:.1f}", "1", "")
    for name, bench in benches.items():
        speed.add_row(
            cell(name),
            f"{bench.n_equal} of {len(bench.runs)}",
            f"{bench.accepted_length:.2f}",
            f"{bench.cycle_cost:.2f}",
            f"{bench.drafted_tokens_per_second:.1f}",
            f"{bench.speedup:.2f}x",
            _shown(bench.paired_speedup(), "x"),
        )
    console.print(speed)
    interval = one.paired_speedup()
    console.print(
        f"L: tokens per verify pass. c(w): time of a cycle over that of a token without drafting. In brackets: the "
        f"interval of the median over {interval.n} prompts at {interval.confidence:.1%} confidence, whatever their "
        "distribution.",
        markup=False,
    )
    _show_acceptance(benches)
    _show_stages(benches)
    if memory is not None:
        of_devices = "".join(f", {name}: {taken / 1e6:.0f} MB" for name, taken in memory.device_bytes.items())
        console.print(
            f"peak memory of this process: {memory.peak_resident_bytes / 1e6:.0f} MB{of_devices}", markup=False
        )
    if measured.left_out:
        console.print(f"left out, too long or too short: {', '.join(measured.left_out)}", markup=False)


def _show_acceptance(benches: Mapping[str, Bench]) -> None:
    """Per draft position, given that all before it were accepted."""
    most = max(len(bench.acceptance_at) for bench in benches.values())
    if not most:
        return
    table = Table("accepted, all before it being so", *(f"{position}" for position in range(1, most + 1)))
    for name, bench in benches.items():
        table.add_row(cell(name), *(f"{share:.2f}" for share in bench.acceptance_at))
    console.print(table)


def _show_stages(benches: Mapping[str, Bench]) -> None:
    """Milliseconds of a cycle by stage, their sum, and the clock's own word."""
    known = {name: bench for name, bench in benches.items() if bench.stage_ms}
    if not known:
        return
    table = Table("ms per cycle", *next(iter(known.values())).stage_ms, "sum", "clock")
    for name, bench in known.items():
        parts = bench.stage_ms.values()
        table.add_row(cell(name), *(f"{ms:.3f}" for ms in (*parts, sum(parts), bench.wall_ms)))
    console.print(table)


def show_change(comparison: BenchComparison) -> None:
    """Ratios of the second measurement to the first."""
    for warning in comparison.warnings:
        errors.print(f"warning: {warning}", style="yellow", markup=False)
    table = Table("second / first", "prompts", "tokens/s", "speedup", "time of a cycle", "L")
    for change in comparison.changes:
        table.add_row(
            cell(change.variant),
            str(change.speed.n),
            _shown(change.speed),
            "-" if change.gain is None else _shown(change.gain),
            _shown(change.cycle),
            "{:.2f}, was {:.2f}".format(*reversed(change.lengths)),
        )
    console.print(table)
    speed = comparison.changes[0].speed
    console.print(
        f"Medians of the ratios per prompt; in brackets their intervals, {speed.confidence:.1%} confidence.",
        markup=False,
    )
    if comparison.unmatched:
        console.print(f"in one of the two only: {', '.join(comparison.unmatched)}", markup=False)


def _shown(interval: MedianInterval, unit: str = "") -> Text:
    """Median and interval, such as 1.43x [1.38, 1.51]."""
    return cell(f"{interval.median:.2f}{unit} [{interval.low:.2f}, {interval.high:.2f}]")
