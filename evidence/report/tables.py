"""Tables of results, as the commands show them: every cell a text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dflash2.evidence.report.charts import Row, of_kind
from dflash2.evidence.results import Result

_SHOWN_RECALL = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Table:
    """A titled table: names of columns, then rows of as many cells."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def tables(result: Result) -> tuple[Table, ...]:
    """The tables of a result; raises KeyError, TypeError or ValueError where its rows are not what is written."""
    of_command: dict[str, Callable[[Result], Iterable[Table]]] = {
        "analyze": _of_analysis,
        "bench": _of_bench,
        "verify": _of_verify,
        "parity": _of_parity,
    }
    return tuple(table for table in of_command[result.command](result) if table.rows)


def number(value: float | None, form: str) -> str:
    """A number in the given format, "-" for one that is not known."""
    return "-" if value is None else format(value, form)


def plain(value: Any) -> str:
    """A setting or a total in words."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {plain(entry)}" for name, entry in value.items()) or "none"
    if isinstance(value, (list, tuple)):
        return ", ".join(plain(entry) for entry in value) or "none"
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    return format(value, ".4g") if isinstance(value, float) else str(value)


def _chain(sampling: Row) -> str:
    """The settings of a sampler chain that do something, as far as that can be seen from their values."""
    idle = {"top_k": 0, "top_p": 1, "min_p": 0, "repeat_penalty": 1, "frequency_penalty": 0, "presence_penalty": 0}
    return plain({name: value for name, value in sampling.items() if idle.get(name) != value})


def _share(count: int, n: int) -> str:
    return f"{count / n:.1%}" if n else "-"


def _of_analysis(result: Result) -> Iterable[Table]:
    summary, positions = result.summary, of_kind(result, "position")
    kinds = (("from every draft", "accepted_length"), ("in cycles", "accepted_length_in_cycles"))
    lengths = [(name, summary[key]) for name, key in kinds if summary[key] is not None]
    yield Table(
        f"Accepted length ({summary['anchors']} drafts of {summary['texts']} texts)",
        ("", "top-1", "path", "oracle"),
        tuple((name, *(number(of[kind], ".2f") for kind in ("top_1", "path", "oracle"))) for name, of in lengths),
    )
    shown = [k for k in _SHOWN_RECALL if positions and k <= len(positions[0]["recall"])]
    yield Table(
        "Recall, the text before the block is right",
        ("position", *(f"@{k}" for k in shown)),
        tuple((str(row["position"]), *(number(row["recall"][k - 1], ".1%") for k in shown)) for row in positions),
    )
    counts = ("top_1_right", "path_right", "fixed", "spoiled")
    yield Table(
        "Acceptance, where the path is right so far",
        ("position", "n", "top-1 right", "path right", "fixed", "spoiled"),
        tuple(
            (str(row["position"]), str(row["n"]), *(_share(row[count], row["n"]) for count in counts))
            for row in positions
        ),
    )
    yield Table(
        f"Calibration of q (expected error {number(summary['calibration_error'], '.3f')})",
        ("q", "n", "mean q", "right"),
        tuple(
            (f"{row['low']:.1f}-{row['high']:.1f}", str(row["n"]), f"{row['mean_q']:.3f}", f"{row['right']:.3f}")
            for row in of_kind(result, "bin")
        ),
    )


def _of_bench(result: Result) -> Iterable[Table]:
    variants = of_kind(result, "variant")
    yield Table(
        "Speed",
        ("", "equal", "L", "c(w)", "tokens/s", "without drafting", "L / c(w)", "median of the prompts' speedups"),
        tuple(_speed_row(row) for row in variants),
    )
    most = max((len(row["acceptance_at"]) for row in variants), default=0)
    yield Table(
        "Accepted, all before it being so",
        ("position", *(str(position) for position in range(1, most + 1))),
        tuple(
            (str(row["variant"]), *_filled([number(share, ".2f") for share in row["acceptance_at"]], most))
            for row in variants
            if most
        ),
    )
    timed = [row for row in variants if row["stage_ms"]]
    stages = list(dict.fromkeys(stage for row in timed for stage in row["stage_ms"]))
    yield Table(
        "Milliseconds per cycle",
        ("", *stages, "sum", "clock"),
        tuple(
            (
                str(row["variant"]),
                *(number(row["stage_ms"].get(stage), ".3f") for stage in stages),
                f"{sum(ms or 0 for ms in row['stage_ms'].values()):.3f}",
                number(row["wall_ms"], ".3f"),
            )
            for row in timed
        ),
    )


def _speed_row(row: Row) -> tuple[str, ...]:
    paired = row["paired_speedup"]
    low, median, high = (number(paired[name], ".2f") for name in ("low", "median", "high"))
    return (
        str(row["variant"]),
        f"{row['equal']} of {row['prompts']}",
        number(row["accepted_length"], ".2f"),
        number(row["cycle_cost"], ".2f"),
        number(row["tokens_per_second"], ".1f"),
        number(row["plain_tokens_per_second"], ".1f"),
        f"{number(row['speedup'], '.2f')}x",
        f"{median}x [{low}, {high}]",
    )


def _filled(cells: list[str], most: int) -> list[str]:
    return cells + [""] * (most - len(cells))


def _of_verify(result: Result) -> Iterable[Table]:
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in of_kind(result, "text"):
        groups.setdefault((str(row["setting"]), str(row["depth"])), []).append(row)
    yield Table(
        "Texts with drafting and without",
        ("", "depth", "texts", "equal tokens", "accepted", "length", "ties", "differ"),
        tuple((*name, *_verify_cells(members)) for name, members in groups.items()),
    )
    differing = [row for row in of_kind(result, "text") if row["difference"] is not None]
    yield Table(
        "Differences",
        ("prompt", "setting", "token", "without drafting", "with", ""),
        tuple(
            (
                str(row["prompt"]),
                str(row["setting"]),
                *(plain(row["difference"][name]) for name in ("position", "without_drafting", "with_drafting")),
                "near-tie" if row["difference"]["is_tie"] else "different",
            )
            for row in differing
        ),
    )
    yield Table(
        "In distribution",
        ("", "chain", "prompt", "draws", "p", "finds w of (90%)", ""),
        tuple(
            (
                str(row["question"]),
                _chain(row["sampling"]),
                str(row["prompt"] or "all"),
                str(row["n"]),
                number(row["p"], ".3g"),
                number(row["detectable"], ".3f"),
                "different" if row["fallen"] else "",
            )
            for row in of_kind(result, "distribution")
        ),
    )
    yield Table(
        "Rows evaluated together",
        ("rows together", "compared", "equal bit for bit", "largest difference", "argmax changes"),
        tuple(
            (
                *(str(row[name]) for name in ("width", "n_rows", "n_equal")),
                number(row["most"], ".2e"),
                str(row["n_flips"]),
            )
            for row in of_kind(result, "width")
        ),
    )


def _verify_cells(members: list[Row]) -> tuple[str, ...]:
    equal, cycles, accepted = (sum(row[name] for row in members) for name in ("tokens_equal", "cycles", "accepted"))
    found = [row["difference"]["is_tie"] for row in members if row["difference"] is not None]
    length = f"{1 + accepted / cycles:.2f}" if cycles else "-"
    return (str(len(members)), str(equal), str(accepted), length, str(sum(found)), str(len(found) - sum(found)))


def _of_parity(result: Result) -> Iterable[Table]:
    yield Table(
        "Stages",
        ("stage", "layer", "error", "explained", "weights", "explained", ""),
        tuple(
            (
                str(row["name"]),
                "" if row["layer"] is None else str(row["layer"]),
                *(number(row[name], ".1e") for name in ("error", "limit", "weights", "weights_limit")),
                "drifts" if row["drifts"] else "",
            )
            for row in of_kind(result, "stage")
        ),
    )
