"""What a picture of the page is made of: marks in a coordinate system of pixels, y downwards."""

from __future__ import annotations

from dataclasses import dataclass

COLOURS = ("#3366aa", "#dd7722", "#339966", "#aa3355", "#7755aa", "#887733", "#2299bb", "#666666")


@dataclass(frozen=True)
class Box:
    """A rectangle with a CSS class or a fill of its own; `hover` shows while the mouse is on it."""

    x: float
    y: float
    width: float
    height: float
    css: str = ""
    fill: str = ""
    hover: str = ""


@dataclass(frozen=True)
class Line:
    """Points [(x, y)] that a line joins."""

    points: tuple[tuple[float, float], ...]
    css: str = ""
    stroke: str = ""
    hover: str = ""

    @property
    def joined(self) -> str:
        """The points as SVG writes them."""
        return " ".join(f"{x:.1f},{y:.1f}" for x, y in self.points)


@dataclass(frozen=True)
class Words:
    """A text; `anchor` is the end of it that stands at x: start, middle or end."""

    x: float
    y: float
    text: str
    anchor: str = "start"
    css: str = ""


@dataclass(frozen=True)
class Drawing:
    """A picture of `width` x `height` pixels, drawn in this order: lines, boxes, words."""

    title: str
    width: float
    height: float
    lines: tuple[Line, ...] = ()
    boxes: tuple[Box, ...] = ()
    words: tuple[Words, ...] = ()


def colour(number: int) -> str:
    """The colour of the series `number`."""
    return COLOURS[number % len(COLOURS)]


def clipped(text: str, most: int) -> str:
    """`text` in at most `most` characters."""
    return text if len(text) <= most else text[: most - 1] + "…"
