"""The page: results with their conditions, tables and pictures, in one file that needs no other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from dflash2.errors import EvidenceError
from dflash2.evidence.machine import Machine
from dflash2.evidence.report.charts import Chart, charts
from dflash2.evidence.report.drawing import Drawing
from dflash2.evidence.report.lattice_view import LatticeView, lattice_views
from dflash2.evidence.report.svg import drawn
from dflash2.evidence.report.tables import Table, plain, tables
from dflash2.evidence.results import Result, read_result
from dflash2.text import printable

REPORTED = ("analyze", "bench", "parity", "verify")
Pairs = tuple[tuple[str, str], ...]  # names and values


@dataclass(frozen=True)
class Section:
    """One result file: its name, what it holds, and how that is shown.

    Attributes:
        machine: in words.
        conditions: titled lists of names and values: options, engine, versions.
        summary: totals, by name.
    """

    file: str
    result: Result
    machine: str
    conditions: tuple[tuple[str, Pairs], ...]
    summary: Pairs
    tables: tuple[Table, ...]
    charts: tuple[Chart, ...]
    lattices: tuple[LatticeView, ...]

    @property
    def drawings(self) -> tuple[Drawing, ...]:
        """The charts, drawn."""
        return tuple(drawn(chart) for chart in self.charts)


def read_section(path: Path) -> Section:
    """What a report shows of the result file at `path`; raises EvidenceError."""
    result = read_result(path)
    if result.command not in REPORTED:
        raise EvidenceError(f"{path} is a result of {result.command!r}; a report shows those of {', '.join(REPORTED)}.")
    try:
        return _section(path.name, result)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise EvidenceError(
            f"The contents of {path} are not those that dflash2 {result.command} writes "
            f"({type(error).__name__}: {error}); measure again."
        ) from error


def _section(name: str, result: Result) -> Section:
    conditions = (("Options", result.conditions), ("Engine", result.engine), ("Versions", result.versions))
    return Section(
        file=name,
        result=result,
        machine=_machine(result.machine),
        conditions=tuple((title, _pairs(entries)) for title, entries in conditions),
        summary=_pairs(result.summary),
        tables=tables(result),
        charts=charts(result),
        lattices=lattice_views(result),
    )


def _machine(machine: Machine) -> str:
    devices = (f"; {device.description}, {device.memory_bytes / 1e9:.1f} GB" for device in machine.devices)
    memory = f"{machine.memory_bytes / 1e9:.1f} GB" if machine.memory_bytes else "memory not known"
    return f"{machine.processor}, {machine.cores} cores, {memory}, {machine.system}{''.join(devices)}"


def _pairs(entries: Mapping[str, Any]) -> Pairs:
    return tuple((name, plain(value)) for name, value in entries.items())


def html(sections: Sequence[Section]) -> str:
    """The page of all `sections`, complete in itself; everything that comes from the files is escaped."""
    environment = Environment(
        loader=PackageLoader("dflash2.evidence.report", "."), autoescape=True, finalize=_shown, trim_blocks=True
    )
    environment.globals["plain"] = plain
    return environment.get_template("page.html.jinja").render(sections=sections)


def _shown(value: Any) -> Any:
    """Characters that do not print, or turn the direction of a line, are spelt out."""
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value
