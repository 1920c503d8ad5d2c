"""Charts drawn: from series to marks."""

from __future__ import annotations

import math

from dflash2.evidence.report.charts import Chart
from dflash2.evidence.report.drawing import Box, Drawing, Line, Words, clipped, colour

_WIDTH, _HEIGHT = 680, 330
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 500, 28, 280  # the plot within the picture; the legend stands to the right
_BAR, _BAR_STEP = 18, 44
_TOTAL = 60  # the total stands behind the bar
_LEGEND_STEP, _LEGEND_CHARACTERS = 18, 24
_TICKS = 5


def drawn(chart: Chart) -> Drawing:
    """The chart as marks."""
    return _bars(chart) if chart.bars else _lines(chart)


def _lines(chart: Chart) -> Drawing:
    xs = [x for one in chart.series for x in one.x] or [0.0, 1.0]
    low, high = min(xs), max(xs)
    top = _top(chart, [y for one in chart.series for y in one.y])
    across = (_RIGHT - _LEFT) / ((high - low) or 1)

    def at(x: float, y: float) -> tuple[float, float]:
        return _LEFT + (x - low) * across, _BOTTOM - y / top * (_BOTTOM - _TOP)

    lines, words, boxes = [], [], []
    for value in (top * step / _TICKS for step in range(_TICKS + 1)):
        _, y = at(low, value)
        lines.append(Line(((_LEFT, y), (_RIGHT, y)), css="grid"))
        words.append(Words(_LEFT - 6, y + 4, f"{value:.3g}", "end"))
    for value in _steps(low, high):
        words.append(Words(at(value, 0)[0], _BOTTOM + 18, f"{value:.3g}", "middle"))
    for number, one in enumerate(chart.series):
        points = tuple(at(x, y) for x, y in zip(one.x, one.y, strict=True))
        lines.append(Line(points, css="curve", stroke=colour(number), hover=one.name))
        for (x, y), of_x, of_y in zip(points, one.x, one.y, strict=True):
            boxes.append(Box(x - 3, y - 3, 6, 6, fill=colour(number), hover=f"{one.name}: {of_x:.4g}, {of_y:.4f}"))
    words.append(Words((_LEFT + _RIGHT) / 2, _BOTTOM + 38, chart.x_label, "middle"))
    words.append(Words(4, 10, chart.y_label))
    legend_boxes, legend_words = _legend(chart)
    height = max(_HEIGHT, _TOP + len(chart.series) * _LEGEND_STEP)
    return Drawing(chart.title, _WIDTH, height, tuple(lines), (*boxes, *legend_boxes), (*words, *legend_words))


def _bars(chart: Chart) -> Drawing:
    totals = [sum(one.y[at] for one in chart.series) for at in range(len(chart.bars))]
    scale = (_RIGHT - _TOTAL - _LEFT) / _top(chart, totals)
    boxes, words = [], []
    for at, (name, total) in enumerate(zip(chart.bars, totals, strict=True)):
        x, y = float(_LEFT), _TOP + at * _BAR_STEP
        words.append(Words(_LEFT, y + 10, clipped(name, 64)))
        for number, one in enumerate(chart.series):
            length = one.y[at] * scale
            boxes.append(
                Box(x, y + 16, length, _BAR, fill=colour(number), hover=f"{name}, {one.name}: {one.y[at]:.4g}")
            )
            x += length
        words.append(Words(x + 6, y + 30, f"{total:.4g}"))
    bottom = _TOP + len(chart.bars) * _BAR_STEP
    words.append(Words((_LEFT + _RIGHT) / 2, bottom + 14, chart.x_label, "middle"))
    legend = _legend(chart) if len(chart.series) > 1 else ((), ())
    height = max(bottom + 24, _TOP + len(legend[0]) * _LEGEND_STEP)
    return Drawing(chart.title, _WIDTH, height, (), (*boxes, *legend[0]), (*words, *legend[1]))


def _legend(chart: Chart) -> tuple[tuple[Box, ...], tuple[Words, ...]]:
    x = _RIGHT + 40
    rows = [(_TOP + number * _LEGEND_STEP, number, one.name) for number, one in enumerate(chart.series)]
    return (
        tuple(Box(x, y, 10, 10, fill=colour(number), hover=name) for y, number, name in rows),
        tuple(Words(x + 16, y + 9, clipped(name, _LEGEND_CHARACTERS - 6)) for y, _, name in rows),
    )


def _top(chart: Chart, values: list[float]) -> float:
    return chart.top or max(values, default=0.0) or 1.0


def _steps(low: float, high: float) -> list[float]:
    """Places for words along x: whole numbers if the ends are, and not too many of them."""
    if low.is_integer() and high.is_integer() and high - low > 1:
        step = math.ceil((high - low) / 16)
        return [low + number * step for number in range(int((high - low) // step) + 1)]
    return [low + (high - low) * number / _TICKS for number in range(_TICKS + 1)]
