"""The lattice of a cycle drawn: a column a position, a box a candidate, a line for the path, a frame for the target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflash2.evidence.report.charts import of_kind
from dflash2.evidence.report.drawing import Box, Drawing, Line, Words, clipped
from dflash2.evidence.results import Result

_COLUMN, _ROW = 118, 24
_BOX_WIDTH, _BOX_HEIGHT = 100, 20
_LEFT, _TOP = 118, 26  # the anchor stands to the left, the numbers of the positions above
_CHARACTERS = 13


@dataclass(frozen=True)
class LatticeView:
    """One cycle: what it is called in the list, and its picture."""

    name: str
    drawing: Drawing


def lattice_views(result: Result) -> tuple[LatticeView, ...]:
    """The lattices that a result holds; raises KeyError, TypeError or ValueError where they are not as written."""
    return tuple(_view(row) for row in of_kind(result, "lattice"))


def _view(row: Mapping[str, Any]) -> LatticeView:
    positions = row["positions"]
    name = f"{row['prompt']}, token {row['token']}: {row['accepted']} of {len(positions)} accepted"
    most = max(len(position["candidates"]) for position in positions)
    anchor_y = _TOP + _BOX_HEIGHT / 2
    boxes = [Box(4, _TOP, _BOX_WIDTH, _BOX_HEIGHT, "anchor", hover=f"anchor {row['anchor']!r}")]
    words = [
        Words(4, 14, "anchor", css="head"),
        Words(10, anchor_y + 4, _short(row["anchor"])),
        Words(4, _TOP + most * _ROW + 16, "target wants", css="head"),
    ]
    points = [(4.0 + _BOX_WIDTH, anchor_y)]
    for column, position in enumerate(positions):
        x = float(_LEFT + column * _COLUMN)
        points += _of_path(position, x)
        of_column = _column(position, x, column + 1, most, accepted=column < row["accepted"])
        boxes += of_column[0]
        words += of_column[1]
    size = (_LEFT + len(positions) * _COLUMN, _TOP + (most + 1) * _ROW + 4)
    return LatticeView(name, Drawing(name, *size, (Line(tuple(points), "way"),), tuple(boxes), tuple(words)))


def _of_path(position: Mapping[str, Any], x: float) -> list[tuple[float, float]]:
    """Where the path goes through a column: along its box."""
    ids = [one["token"] for one in position["candidates"]]
    if position["path"] not in ids:
        return []
    y = _TOP + ids.index(position["path"]) * _ROW + _BOX_HEIGHT / 2
    return [(x, y), (x + _BOX_WIDTH, y)]


def _column(
    position: Mapping[str, Any], x: float, number: int, most: int, *, accepted: bool
) -> tuple[list[Box], list[Words]]:
    boxes, words = [], [Words(x, 14, str(number), css="head")]
    for rank, one in enumerate(position["candidates"]):
        y = float(_TOP + rank * _ROW)
        in_path, wanted = one["token"] == position["path"], one["token"] == position["wanted"]
        kinds = ("candidate", "chosen" if in_path else "", "wanted" if wanted else "")
        boxes.append(
            Box(x, y, _BOX_WIDTH, _BOX_HEIGHT, " ".join(filter(None, kinds)), hover=_scores(one, rank, in_path, wanted))
        )
        words.append(Words(x + 6, y + 14, _short(one["text"])))
    found = position["wanted"] in (one["token"] for one in position["candidates"])
    verdict = "accepted" if accepted else "offered" if found else "missing"
    words.append(Words(x + 6, _TOP + most * _ROW + 16, _short(position["wanted_text"]), css=verdict))
    return boxes, words


def _scores(one: Mapping[str, Any], rank: int, in_path: bool, wanted: bool) -> str:
    said = [f"{one['text']!r} (token {one['token']})", f"rank {rank + 1}"]
    said += [f"logit {one['logit']:.3f}", f"q {one['q']:.4f} behind the path so far"]
    said += ["on the path"] if in_path else []
    said += ["what the target wants"] if wanted else []
    return "\n".join(said)


def _short(text: str) -> str:
    return clipped(repr(text), _CHARACTERS)
