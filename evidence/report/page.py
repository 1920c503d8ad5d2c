"""The page: results with their conditions, tables and pictures, in one file that needs no other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from dflash2.errors import EvidenceError
from dflash2.evidence.report.charts import Chart, charts
from dflash2.evidence.report.drawing import Drawing
from dflash2.evidence.report.lattice_view import LatticeView, lattice_views
from dflash2.evidence.report.svg import drawn
from dflash2.evidence.report.tables import Table, plain, tables
from dflash2.evidence.results import Result, read_result
from dflash2.text import printable

REPORTED = ("analyze", "bench", "parity", "verify")


@dataclass(frozen=True)
class Section:
    """One result file: its name, what it holds, and how that is shown."""

    file: str
    result: Result
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
        return Section(path.name, result, tables(result), charts(result), lattice_views(result))
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise EvidenceError(
            f"The rows of {path} are not those that dflash2 {result.command} writes ({type(error).__name__}: {error}); "
            "measure again."
        ) from error


def html(sections: Sequence[Section]) -> str:
    """The page of all `sections`, complete in itself; everything that comes from the files is escaped."""
    environment = Environment(
        loader=PackageLoader("dflash2.evidence.report", "."), autoescape=True, finalize=_shown, trim_blocks=True
    )
    environment.filters["plain"] = plain
    return environment.get_template("page.html.jinja").render(sections=sections)


def _shown(value: Any) -> Any:
    """Characters that do not print, or turn the direction of a line, are spelt out."""
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value
