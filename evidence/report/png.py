"""The charts as PNG files, through matplotlib (extra `report`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash2.errors import EvidenceError, OutputError
from dflash2.evidence.report.charts import Chart
from dflash2.evidence.report.drawing import clipped, colour
from dflash2.evidence.report.page import Section
from dflash2.text import printable

_INCHES, _DOTS_PER_INCH = (8.0, 4.5), 150
_NAME_CHARACTERS = 48


def write_pngs(sections: Sequence[Section], folder: Path) -> tuple[Path, ...]:
    """Write every chart of `sections` into `folder`, which is made; raises EvidenceError without matplotlib.

    Raises OutputError where a file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise EvidenceError("PNG files need matplotlib: pip install 'llama-dflash2[report]'.") from error
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for number, section in enumerate(sections, 1):
            for chart in section.charts:
                figure = Figure(figsize=_INCHES, dpi=_DOTS_PER_INCH, layout="constrained")
                _plot(figure.add_subplot(), chart)
                written.append(folder / f"{number}-{section.result.command}-{chart.name}.png")
                figure.savefig(written[-1])
    except OSError as error:
        raise OutputError(f"Cannot write into {folder}: {error.strerror or error}.") from error
    return tuple(written)


def _plot(axes: Any, chart: Chart) -> None:
    if chart.bars:
        places, reached = range(len(chart.bars)), [0.0] * len(chart.bars)
        for number, one in enumerate(chart.series):
            axes.barh(places, one.y, left=reached, color=colour(number), label=_literal(one.name))
            reached = [before + length for before, length in zip(reached, one.y, strict=True)]
        axes.set_yticks(places, [_literal(name) for name in chart.bars])
        axes.invert_yaxis()
    else:
        for number, one in enumerate(chart.series):
            axes.plot(one.x, one.y, marker="o", color=colour(number), label=_literal(one.name))
        axes.set_ylim(0, chart.top)
        axes.set_ylabel(chart.y_label)
    axes.set_title(chart.title)
    axes.set_xlabel(chart.x_label)
    axes.legend()


def _literal(text: str) -> str:
    """A name from a file as it is: no formula, no label that hides itself."""
    return clipped(printable(text), _NAME_CHARACTERS).replace("$", r"\$").lstrip("_")
