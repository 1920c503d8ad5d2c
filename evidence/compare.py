"""Measurements as rows of a result file, and two such files against each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dflash2.errors import EvidenceError
from dflash2.evidence.bench import Bench, Measured, PromptRuns
from dflash2.evidence.engines import Run
from dflash2.evidence.intervals import LEVEL, MedianInterval, median_interval
from dflash2.evidence.prompts import Prompt
from dflash2.evidence.results import Result, same_models

PLAIN = "no drafting"


def bench_rows(measured: Measured, prompts: Sequence[Prompt]) -> tuple[dict[str, Any], ...]:
    """One row per variant ("variant"), then one per variant and prompt ("run"), those without drafting included."""
    totals = [_total_row(name, bench) for name, bench in measured.benches.items()]
    any_bench = next(iter(measured.benches.values()))
    runs = [_run_row(PLAIN, prompts[pair.prompt], pair, pair.plain) for pair in any_bench.runs]
    for name, bench in measured.benches.items():
        runs += [_run_row(name, prompts[pair.prompt], pair, pair.drafted) for pair in bench.runs]
    return (*totals, *runs)


def _total_row(name: str, bench: Bench) -> dict[str, Any]:
    return {
        "kind": "variant",
        "variant": name,
        "prompts": len(bench.runs),
        "equal": bench.n_equal,
        "accepted_length": bench.accepted_length,
        "acceptance": bench.acceptance,
        "acceptance_at": list(bench.acceptance_at),
        "cycle_cost": bench.cycle_cost,
        "plain_tokens_per_second": bench.plain_tokens_per_second,
        "tokens_per_second": bench.drafted_tokens_per_second,
        "speedup": bench.speedup,
        "paired_speedup": asdict(bench.paired_speedup()),
        "stage_ms": dict(bench.stage_ms),
        "wall_ms": bench.wall_ms,
    }


def _run_row(name: str, prompt: Prompt, pair: PromptRuns, run: Run) -> dict[str, Any]:
    stats = run.stats
    return {
        "kind": "run",
        "variant": name,
        "prompt": prompt.id,
        "category": prompt.category,
        "equal": run.tokens == pair.plain.tokens,
        "tokens": len(run.tokens),
        "seconds": run.seconds,
        "passes": run.passes,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "prompt_tokens": stats.prompt_tokens,
        "prompt_seconds": stats.prompt_seconds,
    }


@dataclass(frozen=True)
class Change:
    """One variant in two results: ratios of the second to the first, over the prompts that both have.

    Attributes:
        speed: of tokens per second.
        gain: of the speedup over no drafting in the same result; None for what does not draft. A machine that is
            faster in all it does leaves it at 1.
        lengths: accepted length in both, of these prompts.
        cycle: of the time of one verify pass.
    """

    variant: str
    speed: MedianInterval
    gain: MedianInterval | None
    lengths: tuple[float, float]
    cycle: MedianInterval


@dataclass(frozen=True)
class BenchComparison:
    """What changed between two results, variants that only one has, and reasons why they may not be comparable."""

    changes: tuple[Change, ...]
    unmatched: tuple[str, ...]
    warnings: tuple[str, ...]


def compare_benches(first: Result, second: Result, level: float = LEVEL) -> BenchComparison:
    """Compare two results of bench, prompt by prompt; raises EvidenceError if they have no run in common."""
    a, b = _runs(first), _runs(second)
    shared = [name for name in a if name in b and a[name].keys() & b[name].keys()]
    if not shared:
        raise EvidenceError("The two results share no variant with a common prompt; measure the same drafter and sets.")
    return BenchComparison(
        tuple(_change(name, a, b, level) for name in shared),
        tuple(name for name in (*a, *b) if name not in shared),
        _warnings(first, second),
    )


_Runs = Mapping[str, Mapping[str, Mapping[str, Any]]]  # by variant, then by prompt


def _runs(result: Result) -> dict[str, dict[str, Mapping[str, Any]]]:
    found: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in result.rows:
        if row.get("kind") == "run":
            found.setdefault(str(row["variant"]), {})[str(row["prompt"])] = row
    return found


def _change(name: str, a: _Runs, b: _Runs, level: float) -> Change:
    prompts = [prompt for prompt in a[name] if prompt in b[name]]
    speeds = [_speed(b[name][prompt]) / _speed(a[name][prompt]) for prompt in prompts]
    bases = a.get(PLAIN, {}), b.get(PLAIN, {})
    relative = [
        speed / (_speed(bases[1][prompt]) / _speed(bases[0][prompt]))
        for prompt, speed in zip(prompts, speeds, strict=True)
        if prompt in bases[0] and prompt in bases[1]
    ]
    return Change(
        name,
        median_interval(speeds, level),
        median_interval(relative, level) if relative and name != PLAIN else None,
        (_length(a[name], prompts), _length(b[name], prompts)),
        median_interval([_pass_seconds(b[name][one]) / _pass_seconds(a[name][one]) for one in prompts], level),
    )


def _speed(row: Mapping[str, Any]) -> float:
    return float((row["tokens"] - 1) / row["seconds"])


def _pass_seconds(row: Mapping[str, Any]) -> float:
    return float(row["seconds"] / row["passes"])


def _length(rows: Mapping[str, Mapping[str, Any]], prompts: Sequence[str]) -> float:
    accepted, passes = (sum(rows[prompt][count] for prompt in prompts) for count in ("accepted", "passes"))
    return float(1 + accepted / passes)


def _warnings(first: Result, second: Result) -> tuple[str, ...]:
    found = []
    if not same_models(first.models, second.models):
        found.append("the models differ")
    if first.machine != second.machine:
        found.append(f"the machines differ: {first.machine.processor} and {second.machine.processor}")
    if dict(first.engine) != dict(second.engine):
        found.append("the engines differ")
    names = sorted({*first.conditions, *second.conditions})
    other = [name for name in names if first.conditions.get(name) != second.conditions.get(name)]
    if other:
        found.append(f"other options: {', '.join(other)}")
    if first.versions != second.versions:
        found.append("the versions of the packages differ")
    return tuple(found)
