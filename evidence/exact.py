"""Is the target row-invariant: does a row of logits, bit for bit, not depend on how many rows go with it?

Where it is, greedy output with drafting is that without, to the last token. Where it is not, near-ties may fall either
way, and `first_break` says which operation is to blame.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dflash2.evidence.fresh import as_tokens, feed, fresh_context, rows
from dflash2.native import Context, FloatArray, IntArray, Observer, Operation, Outputs
from dflash2.runtime import DFlashLlama

_LAYER = re.compile(r"(?:-|_l|blk\.)(\d+)\b")


@dataclass(frozen=True)
class Width:
    """Rows evaluated in batches of `width` against the same rows one by one.

    Attributes:
        n_rows: rows compared; `n_equal` of them are the same bit for bit.
        most: largest difference of two logits.
        n_flips: rows whose likeliest token is another one.
        first: position of the first row that differs, None if none does.
    """

    width: int
    n_rows: int
    n_equal: int
    most: float
    n_flips: int
    first: int | None


@dataclass(frozen=True)
class Break:
    """The first operation of a graph whose result depends on the number of rows, its observed inputs being the same.

    Attributes:
        operation: ggml's name, such as MUL_MAT; `name` that of its result, `layer` the layer in it, None outside one.
        inputs, types: names of what it reads, and their types.
        width: rows evaluated together.
        row: the first row that differs, counted from 0.
        most: largest difference in it.
        place: how many operations were compared before, and found equal.
    """

    operation: str
    name: str
    layer: int | None
    inputs: tuple[str, ...]
    types: tuple[str, ...]
    width: int
    row: int
    most: float
    place: int


@dataclass(frozen=True)
class Exactness:
    """Outcome over all widths; `broken_by` is None if all are exact.

    It is None too if the operations, computed one at a time, are all equal: then a fused kernel is to blame.
    """

    widths: tuple[Width, ...]
    broken_by: Break | None

    @property
    def exact(self) -> bool:
        """Whether every row is the same at every width."""
        return all(width.n_equal == width.n_rows for width in self.widths)


def exactness(
    llm: DFlashLlama,
    texts: Sequence[Sequence[int]],
    widths: Sequence[int],
    *,
    progress: Callable[[int, int], None] | None = None,
) -> Exactness:
    """Compare the rows after every token of `texts` (token ids that fit the context) at all `widths`, 2 and more.

    Raises NativeError.
    """
    found: dict[int, list[Width]] = {width: [] for width in widths}
    worst: tuple[IntArray, Width] | None = None
    with fresh_context(llm) as context:
        for done, text in enumerate(texts):
            tokens = as_tokens(text)
            context.clear()
            single = np.array([row.copy() for row in rows(context, tokens, 0, [1])])
            for width in widths:
                context.clear()
                one = _compare(single, rows(context, tokens, 0, [width]), width)
                found[width].append(one)
                if one.first is not None and worst is None:
                    worst = (tokens, one)
            if progress is not None:
                progress(done + 1, len(texts))
    broken = None
    if worst is not None:
        tokens, one = worst
        assert one.first is not None
        start = one.first // one.width * one.width
        broken = first_break(llm, tokens[:start], tokens[start : start + one.width])
    return Exactness(tuple(_total(parts) for parts in found.values()), broken)


def _compare(single: FloatArray, others: Iterator[FloatArray], width: int) -> Width:
    n_equal = n_flips = 0
    most, first = 0.0, None
    for position, (row, other) in enumerate(zip(single, others, strict=True)):
        if _same(row, other).all():
            n_equal += 1
            continue
        first = position if first is None else first
        most = max(most, _largest(row, other))
        n_flips += int(row.argmax() != other.argmax())
    return Width(width, len(single), n_equal, most, n_flips, first)


def _total(parts: Sequence[Width]) -> Width:
    return Width(
        width=parts[0].width,
        n_rows=sum(one.n_rows for one in parts),
        n_equal=sum(one.n_equal for one in parts),
        most=max(one.most for one in parts),
        n_flips=sum(one.n_flips for one in parts),
        first=next((one.first for one in parts if one.first is not None), None),
    )


def _same(a: FloatArray, b: FloatArray) -> npt.NDArray[np.bool_]:
    """Where two arrays are the same bit for bit."""
    same: npt.NDArray[np.bool_] = np.ascontiguousarray(a).view(np.uint32) == np.ascontiguousarray(b).view(np.uint32)
    return same


def _largest(a: FloatArray, b: FloatArray) -> float:
    """Largest difference; masked numbers (-inf in both) have none."""
    with np.errstate(invalid="ignore"):
        return float(np.nanmax(np.abs(a - b), initial=0.0))


def first_break(llm: DFlashLlama, prefix: Sequence[int] | IntArray, block: Sequence[int] | IntArray) -> Break | None:
    """Evaluate `block` behind `prefix` at once and token by token; the first operation whose results differ.

    Graphs are compared by the names of their results, so that what only one of them has is passed over. Raises
    NativeError if the library's operations cannot be observed.
    """
    before, tokens = as_tokens(prefix), as_tokens(block)
    together = _Graph()
    with fresh_context(llm, Observer(together.note)) as context:
        feed(context, before, 0, 1)
        together.clear()
        context.decode_tokens(tokens, len(before), Outputs.ALL)
    first: Break | None = None
    single = _Graph()
    with fresh_context(llm, Observer(single.note)) as context:
        _fill(context, before, tokens)
        for row in range(len(tokens)):
            single.clear()
            context.decode_tokens(tokens[row : row + 1], len(before) + row, Outputs.ALL)
            found = _first_of(together, single, row, len(tokens))
            if found is not None and (first is None or found.place < first.place):
                first = found
    return first


def _fill(context: Context, before: IntArray, tokens: IntArray) -> None:
    """Evaluate `before`, and leave in the cells behind it what all `tokens` at once put there.

    An attention that multiplies first and masks afterwards reads them, so they must not differ.
    """
    feed(context, before, 0, 1)
    if context.snapshots is None:
        context.decode_tokens(tokens, len(before), Outputs.ALL)
        context.truncate(len(before))


class _Graph:
    """The operations of the last decode by name and occurrence, in order."""

    def __init__(self) -> None:
        self.operations: dict[tuple[str, str, int], Operation] = {}
        self._seen: Counter[tuple[str, str]] = Counter()

    def clear(self) -> None:
        self.operations.clear()
        self._seen.clear()

    def note(self, operation: Operation) -> None:
        key = (operation.name, operation.operation)
        self.operations[(*key, self._seen[key])] = operation
        self._seen[key] += 1


def _first_of(together: _Graph, single: _Graph, row: int, width: int) -> Break | None:
    place = 0
    for key, operation in together.operations.items():
        other = single.operations.get(key)
        if other is None or operation.values is None or other.values is None:
            continue
        own = _row_of(operation.values, other.values, row, width)
        if own is None:
            continue
        if not _same(own, other.values).all():
            return Break(
                operation=operation.operation,
                name=operation.name,
                layer=_layer((operation.name, *operation.inputs)),
                inputs=operation.inputs,
                types=operation.types,
                width=width,
                row=row,
                most=_largest(own, other.values),
                place=place,
            )
        place += 1
    return None


def _row_of(values: FloatArray, single: FloatArray, row: int, width: int) -> FloatArray | None:
    """Row `row` of `values` in the shape of `single`: the axis that has `width` entries here and one there."""
    axes = [axis for axis, (a, b) in enumerate(zip(values.shape, single.shape, strict=True)) if a != b]
    if len(axes) != 1 or values.shape[axes[0]] != width or single.shape[axes[0]] != 1:
        return None
    return np.take(values, [row], axis=axes[0])


def _layer(names: Sequence[str]) -> int | None:
    found = (_LAYER.search(name) for name in names)
    return next((int(match[1]) for match in found if match), None)
