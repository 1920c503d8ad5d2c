"""`dflash2 bench`: what it counts, that its parts add up, what its intervals promise, and saved runs."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner
from generation import EXACT
from llama_server import LlamaServer
from server_pair import server_arguments

from dflash2.cli import cli
from dflash2.errors import EvidenceError
from dflash2.evidence import (
    PLAIN,
    LlamaServerEngine,
    Result,
    Variant,
    bench_rows,
    builtin_prompts,
    compare_benches,
    measure,
    median_interval,
    opened,
    read_result,
    texts,
    write_result,
)
from dflash2.patches import build

N_TOKENS = 48
OPTIONS = {name: value for name, value in EXACT.items() if name != "verbose"}


@pytest.fixture(scope="module")
def own_prompts(prompts):
    return texts(prompts[:12])


@pytest.fixture(scope="module")
def engine(target_path, exact_drafters):
    with opened(target_path, exact_drafters["v2"], OPTIONS) as engine:
        yield engine


@pytest.fixture(scope="module")
def measured(engine, target_path, exact_drafters, own_prompts):
    """v2 at two depths and "auto", v1, and once more no drafting at all."""
    with opened(target_path, exact_drafters["v1"], OPTIONS) as other:
        variants = [
            Variant("v2", engine),
            Variant("v2, 3", engine, 3),
            Variant("auto", engine, "auto"),
            Variant("v1", other),
            Variant("itself", engine, 0),
        ]
        return measure(Variant(PLAIN, engine, 0), variants, own_prompts, n_tokens=N_TOKENS, past_end=True)


@pytest.fixture(scope="module")
def saved(measured, engine, own_prompts):
    return Result("bench", engine.about(), (), {"tokens": N_TOKENS}, bench_rows(measured, own_prompts), {})


def test_texts_are_equal_whatever_drafts(measured):
    for name, bench in measured.benches.items():
        assert bench.n_equal == len(bench.runs) == 12, name
        assert all(len(run.drafted.tokens) == N_TOKENS for run in bench.runs), name
    assert len({bench.runs[3].drafted.tokens for bench in measured.benches.values()}) == 1


@pytest.mark.parametrize("name", ["v2", "v2, 3", "auto", "v1", "itself"])
def test_the_stages_add_up_to_the_time_of_the_clock_outside(measured, name):
    bench = measured.benches[name]
    assert set(bench.stage_ms) == {"inject", "draft", "select", "verify", "accept", "rollback", "host"}
    assert sum(bench.stage_ms.values()) == pytest.approx(bench.wall_ms, rel=0.03)


def test_an_engine_against_itself_is_within_its_own_spread(measured):
    bench = measured.benches["itself"]
    spread = bench.paired_speedup(level=0.999)
    assert spread.confidence > 0.999 and spread.low < spread.high
    assert spread.holds(1.0), spread
    assert bench.accepted_length == 1.0 and bench.acceptance == 0.0 and bench.acceptance_at == ()
    assert bench.speedup == pytest.approx(1 / bench.cycle_cost)


@pytest.mark.parametrize(("name", "depth"), [("v2", 7), ("v2, 3", 3), ("v1", 7)])
def test_acceptance_per_position_makes_the_accepted_length(measured, name, depth):
    bench = measured.benches[name]
    assert len(bench.acceptance_at) == depth
    assert all(0 <= share <= 1 for share in bench.acceptance_at)
    assert 1 + sum(np.cumprod(bench.acceptance_at)) == pytest.approx(bench.accepted_length)
    assert 1.5 < bench.accepted_length < depth + 1
    assert bench.speedup == pytest.approx(bench.accepted_length / bench.cycle_cost)


def test_at_a_changing_depth_tokens_without_drafts_count_as_passes(measured):
    bench = measured.benches["auto"]
    for run in bench.runs:
        stats = run.drafted.stats
        assert run.drafted.passes == stats.cycles + stats.at_depth[0] == sum(stats.at_depth)
        # The last cycle may have accepted more than was taken.
        assert 0 <= run.drafted.passes + stats.accepted - (N_TOKENS - 1) <= 7
        assert stats.reached_at[0] == stats.cycles
        assert all(a <= r <= d for a, r, d in zip(stats.accepted_at, stats.reached_at, stats.drafted_at, strict=True))


def test_prompts_that_do_not_fit_are_named_and_if_none_fits_it_is_said(engine, own_prompts):
    longest = max(own_prompts, key=lambda prompt: len(engine.tokens_of(prompt, chat=False)))
    n_ctx = len(engine.tokens_of(longest, chat=False)) + 8 - 1
    plain = Variant(PLAIN, engine, 0)
    few = [longest, *(prompt for prompt in own_prompts if prompt is not longest)][:3]
    done = []
    found = measure(plain, [Variant("v2", engine)], few, n_tokens=8, n_ctx=n_ctx, progress=lambda *at: done.append(at))
    assert longest.id in found.left_out
    assert {few[run.prompt].id for run in found.benches["v2"].runs} | set(found.left_out) == {one.id for one in few}
    assert done[-1][0] == done[-1][1] == len(done)
    with pytest.raises(EvidenceError, match="No prompt fits the context"):
        measure(plain, [Variant("v2", engine)], few, n_tokens=8, n_ctx=9)


@pytest.mark.parametrize("n", [6, 12, 25, 46])
def test_the_interval_holds_the_median_as_often_as_it_says(n):
    random = np.random.default_rng(n)
    draws = random.exponential(size=(4000, n))  # skewed: a mean and its error would be off
    intervals = [median_interval(values) for values in draws.tolist()]
    stated = intervals[0].confidence
    assert stated >= 0.95
    assert np.mean([one.holds(math.log(2)) for one in intervals]) == pytest.approx(stated, abs=0.012)
    assert all(one.low < one.median < one.high for one in intervals)


def test_few_values_give_their_extremes_and_the_confidence_that_is_left():
    assert median_interval([3.0]) == replace(median_interval([3.0, 3.0]), confidence=0.0, n=1)
    interval = median_interval([4.0, 1.0, 2.0])
    assert (interval.median, interval.low, interval.high, interval.confidence) == (2.0, 1.0, 4.0, 0.75)


def test_numbers_that_are_not_finite_are_null_in_a_file(saved, tmp_path):
    write_result(replace(saved, rows=({"kind": "x", "a": math.inf, "b": [math.nan, 1.5]},)), tmp_path / "a.json")
    assert json.loads((tmp_path / "a.json").read_text())["rows"] == [{"kind": "x", "a": None, "b": [None, 1.5]}]


def test_a_saved_run_against_a_slower_one(saved, tmp_path):
    def slower(row):
        factor = {"v2": 2.0, PLAIN: 1.25}.get(row["variant"], 1.0)
        return {**row, "seconds": row["seconds"] * factor} if row["kind"] == "run" else row

    for name, result in {"a": saved, "b": replace(saved, rows=tuple(map(slower, saved.rows)))}.items():
        write_result(result, tmp_path / f"{name}.json")
    a, b = (read_result(tmp_path / f"{name}.json", "bench") for name in "ab")
    comparison = compare_benches(a, b)
    changes = {change.variant: change for change in comparison.changes}
    assert list(changes) == [PLAIN, "v2", "v2, 3", "auto", "v1", "itself"]
    assert comparison.warnings == comparison.unmatched == ()
    assert changes["v2"].speed.median == pytest.approx(0.5)
    assert changes["v2"].cycle.low == changes["v2"].cycle.high == pytest.approx(2.0)
    assert changes["v2"].gain.median == pytest.approx(0.5 * 1.25)
    assert changes["v1"].gain.median == pytest.approx(1.25) and changes["v1"].speed.median == 1.0
    assert changes[PLAIN].gain is None and changes[PLAIN].speed.median == pytest.approx(0.8)
    assert changes["v2"].lengths[0] == changes["v2"].lengths[1] > 2


def test_what_cannot_be_compared_is_a_warning_or_one_sentence(saved):
    machine = replace(saved.machine, processor="another")
    other = replace(saved, machine=machine, conditions={"tokens": 1}, versions={})
    rows = tuple(row for row in saved.rows if row["variant"] != "v1")
    comparison = compare_benches(saved, replace(other, rows=rows))
    assert comparison.unmatched == ("v1",)
    assert [warning.split(":")[0] for warning in comparison.warnings] == [
        "the machines differ",
        "other options",
        "the versions of the packages differ",
    ]
    with pytest.raises(EvidenceError, match="share no variant"):
        compare_benches(saved, replace(saved, rows=()))


def test_the_command_measures_writes_and_compares(target_path, exact_drafters, tmp_path):
    runner, outputs = CliRunner(env={"COLUMNS": "200"}), [tmp_path / "a.json", tmp_path / "b.json"]
    pair = [str(target_path), str(exact_drafters["v2"])]
    for output in outputs:
        options = ["-c", "512", "-t", "1", "-n", "24", "--limit", "1", "--category", "code", "--category", "chat"]
        more = ["--also", str(exact_drafters["v1"]), "--depth", "most", "--depth", "2", "--json", str(output)]
        done = runner.invoke(cli, ["bench", *pair, *options, *more])
        assert done.exit_code == 0, done.output
    assert "v2.gguf, depth 7" in done.output and "peak memory" in done.output
    result = read_result(outputs[0], "bench")
    assert [model.role for model in result.models] == ["target", "drafter", "drafter 2"]
    names = [f"{name}.gguf, depth {depth}" for name in ("v2", "v1") for depth in (7, 2)]
    assert [row["variant"] for row in result.rows if row["kind"] == "variant"] == names
    runs = [row for row in result.rows if row["kind"] == "run"]
    assert [(row["variant"], row["prompt"]) for row in runs] == [
        (name, prompt) for name in (PLAIN, *names) for prompt in ("code-1", "chat-1")
    ]
    assert all(row["equal"] and 2 <= row["tokens"] <= 24 for row in runs)
    assert result.summary["memory"]["peak_resident_bytes"] > target_path.stat().st_size
    compared = runner.invoke(cli, ["bench", "compare", *map(str, outputs)])
    assert compared.exit_code == 0, compared.output
    assert all(name in compared.output for name in (PLAIN, *names)) and "warning" not in compared.output


def test_a_server_is_measured_against_one_without_a_drafter(target_path, exact_drafters, tmp_path):
    program = build(stock=True, targets=("server",)).server
    drafting, plain = (server_arguments(target_path, drafter) for drafter in (exact_drafters["v2"], None))
    with (
        LlamaServer(program, drafting, tmp_path / "drafting") as server,
        LlamaServer(program, plain, tmp_path / "plain") as reference,
    ):
        output = tmp_path / "server.json"
        options = ["-n", "32", "--limit", "2", "--category", "code", "--past-end", "--no-chat", "--json", str(output)]
        urls = ["--url", server.url, "--reference-url", reference.url]
        done = CliRunner(env={"COLUMNS": "200"}).invoke(cli, ["bench", *options, *urls])
        assert done.exit_code == 0, done.output
        stepwise = LlamaServerEngine(server.url)
        prompts = builtin_prompts(["code"], most=1)
        found = measure(Variant(PLAIN, stepwise, 0), [Variant("server", stepwise)], prompts, n_tokens=16, past_end=True)
        stepwise.close()
    (total,) = (row for row in read_result(output, "bench").rows if row["kind"] == "variant")
    assert total["variant"] == "llama-server" and total["equal"] == total["prompts"] == 2
    assert 1.2 < total["accepted_length"] < 8
    assert total["stage_ms"] == {} and total["acceptance_at"] == []  # a stock server does not tell
    assert found.benches["server"].n_equal == 1 and found.benches["server"].accepted_length > 1


def test_options_that_exclude_each_other_are_named(target_path):
    runner = CliRunner()
    for arguments, message in (
        ([str(target_path)], "give TARGET and DRAFTER"),
        (["--url", "http://127.0.0.1:1", "--depth", "3"], "no --also, no --depth"),
        ([str(target_path), "x.gguf", "--reference-url", "http://127.0.0.1:1"], "--reference-url needs --url"),
    ):
        done = runner.invoke(cli, ["bench", *arguments])
        assert done.exit_code == 2 and message in done.output, done.output
