"""`dflash2 verify`: what it passes, what it finds, and what it says. Faults are put in by verify_runner.py."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from generation import EXACT
from llama_server import LlamaServer
from server_pair import server_arguments

from dflash2.converter import convert
from dflash2.evidence import (
    END,
    GREEDILY,
    Difference,
    PythonEngine,
    Sampling,
    Setting,
    builtin_prompts,
    exactness,
    opened,
    read_result,
    scaled_target,
    texts,
    verify,
)
from dflash2.evidence.ties import judge
from dflash2.evidence.verify import first_difference
from dflash2.gguf_info import read_gguf_info
from dflash2.patches import build

FULL = bool(os.environ.get("DFLASH2_FULL"))
RUNNER = Path(__file__).with_name("verify_runner.py")
OPTIONS = {name: value for name, value in EXACT.items() if name != "verbose"}


def run(fault, *arguments, library="stock"):
    """The command in a process of its own, with a fault in its runtime."""
    command = [sys.executable, str(RUNNER), fault, "verify", *map(str, arguments)]
    environment = {**os.environ, "DFLASH2_LIBRARY": str(library), "COLUMNS": "200"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def pair(target_path, exact_drafters):
    return target_path, exact_drafters["v2"]


@pytest.fixture(scope="module")
def engine(pair):
    with opened(*pair, OPTIONS) as engine:
        yield engine


@pytest.fixture(scope="module")
def f16_engine(demo, exact_drafters):
    """A target that is not row-invariant."""
    with opened(scaled_target(demo.target, parameters=0), exact_drafters["v2"], OPTIONS) as engine:
        yield engine


def test_an_unchanged_output_passes_and_is_written_down(pair, tmp_path):
    output = tmp_path / "result.json"
    done = run("none", *pair, "-t", 1, "--limit", 2, "--depth", "most", "--depth", 2, "--json", output)
    assert done.returncode == 0, done.stderr
    assert "The output is unchanged" in done.stdout
    result = read_result(output, "verify")
    assert result.summary["passed"] and result.summary["differences"] == 0
    assert len(result.rows) == 10 * 2 * 2  # prompts, settings, depths
    assert {row["category"] for row in result.rows} == {"code", "maths", "chat", "prose", "json"}
    assert sum(row["tokens_equal"] for row in result.rows) == result.summary["tokens_equal"] > 3_500
    assert {row["depth"] for row in result.rows} == {"most", 2}
    assert result.summary["accepted_length"] > 2
    assert [model.role for model in result.models] == ["target", "drafter"]


@pytest.mark.parametrize("fault", ["wrong_greedy_accept", "wrong_sampled_accept"])
def test_one_wrong_token_accepted_in_a_thousand_is_found(pair, fault, tmp_path):
    output = tmp_path / "result.json"
    size = ("--limit", 2, "--every-setting") if fault == "wrong_sampled_accept" else ("--limit", 4)
    done = run(fault, *pair, "-t", 1, "-n", 150, "--verify", "coupled", *size, "--json", output)
    assert done.returncode == 1, done.stdout
    assert "The output CHANGES with drafting" in done.stdout
    summary = read_result(output).summary
    assert 1 <= summary["differences"] <= summary["accepted"] / 500
    assert summary["near_ties"] == 0


def test_a_cache_rolled_back_to_another_token_s_row_is_found(pair):
    done = run("another_token_s_row", *pair, "-t", 1, "--limit", 1)
    assert done.returncode == 1
    assert "DIFFERENT: code-1, greedy" in done.stdout


def test_a_cache_rolled_back_one_row_too_few_is_an_error(pair):
    """llama.cpp notices this one: positions no longer follow each other."""
    done = run("one_row_too_many", *pair, "-t", 1, "--limit", 1)
    assert done.returncode == 1
    assert done.stderr.startswith("error: llama.cpp could not evaluate")


@pytest.mark.parametrize(("fault", "passes"), [("none", True), ("other_temperature", False)])
def test_rejection_is_tested_in_distribution(pair, fault, passes, tmp_path):
    output = tmp_path / "result.json"
    sizes = ("--limit", 4, "-n", 100) if FULL else ("--limit", 1, "-n", 60, "--draws", 600)
    done = run(fault, *pair, "-t", 1, "--verify", "rejection", *sizes, "--json", output)
    assert done.returncode == (0 if passes else 1), done.stdout + done.stderr
    assert ("fits the target's distribution" in done.stdout) is passes
    rows = [row for row in read_result(output).rows if row["kind"] == "distribution"]
    assert len(rows) == 8
    assert any(row["fallen"] for row in rows) is not passes
    assert all(0.05 < row["detectable"] < 0.5 for row in rows)


def test_a_drafter_for_another_target_passes_and_is_said_to_accept_little(demo, pair, tmp_path):
    other = tmp_path / "other.gguf"
    convert(demo.drafter, demo.target, other)
    tensor = read_gguf_info(other).tensor("fc.weight")
    data = np.memmap(other, np.uint8, "r+", tensor.offset, (tensor.shape[1], tensor.n_bytes // tensor.shape[1]))
    data[:] = np.random.default_rng(1).permutation(data)
    data.flush()
    done = run("none", pair[0], other, "-t", 1, "--limit", 1, "--verify", "match")
    assert done.returncode == 0, done.stdout
    assert "The output is unchanged" in done.stdout
    assert "Acceptance is low" in done.stdout


def test_a_quantised_target_is_row_invariant(engine):
    tokenised = [engine.tokens_of(prompt, chat=False) for prompt in builtin_prompts(most=1)]
    outcome = exactness(engine.llm, tokenised, [2, 5, 8])
    assert outcome.exact and outcome.broken_by is None
    assert [one.width for one in outcome.widths] == [2, 5, 8]
    assert all(one.n_rows == one.n_equal > 300 for one in outcome.widths)


def test_the_first_operation_that_depends_on_the_rows_is_named(f16_engine):
    tokens = f16_engine.tokens_of(builtin_prompts(["prose"])[0], chat=False)
    outcome = exactness(f16_engine.llm, [tokens], [2, 8])
    assert not outcome.exact
    broken = outcome.broken_by
    assert (broken.operation, broken.name, broken.layer) == ("MUL_MAT", "Qcur-0", 0)
    assert broken.inputs[0] == "blk.0.attn_q.weight" and broken.types[0] == "f16"
    assert 0 < broken.most < 1e-4 and broken.width == 2
    assert all(0 < one.most < 0.05 for one in outcome.widths)


def test_without_flash_attention_it_is_an_operation_of_attention(pair):
    with opened(*pair, {**OPTIONS, "flash_attn": False}) as plain:
        tokens = plain.tokens_of(builtin_prompts(["code"])[1], chat=False)
        outcome = exactness(plain.llm, [tokens], [8])
    assert not outcome.exact
    assert outcome.broken_by.operation in ("MUL_MAT", "SOFT_MAX")
    assert outcome.broken_by.types[0] == "f16" and outcome.broken_by.inputs[0].startswith("cache_")


def test_exact_says_so_and_exits_with_1_where_it_is_not(demo, pair, tmp_path):
    output = tmp_path / "exact.json"
    done = run("none", *pair, "-t", 1, "--exact", "--json", output)
    assert done.returncode == 0 and "Row-invariant:" in done.stdout
    assert {row["width"] for row in read_result(output).rows} == set(range(2, 9))
    target = scaled_target(demo.target, parameters=0)
    done = run("none", target, pair[1], "-t", 1, "--exact", "--limit", 1)
    assert done.returncode == 1
    assert "Not row-invariant: MUL_MAT Qcur-0 of layer 0, blk.0.attn_q.weight (f16) x attn_norm-0 (f32)" in done.stdout


def test_near_ties_are_judged_by_contexts_without_drafter(f16_engine, prompts):
    """On F16 weights about one text in twelve flips; every flip is a near-tie, and all its logits are told."""
    outcome = verify(f16_engine, texts(prompts[24:]), settings=GREEDILY, n_tokens=200, n_ctx=512)
    assert outcome.unchanged and len(outcome.ties) >= 1
    for one in outcome.ties:
        judgement = one.difference.judgement
        rivals = [candidate.token for candidate in judgement.candidates[:2]]
        assert rivals == [one.difference.without_drafting, one.difference.with_drafting]
        gaps = [a - b for a, b in zip(*(candidate.logits for candidate in judgement.candidates[:2]), strict=True)]
        assert abs(gaps[0]) <= 0.05 and max(abs(gap - gaps[0]) for gap in gaps) > abs(gaps[0])
        assert len(judgement.evaluations) == len(gaps) == 9


def test_a_wrong_token_is_no_near_tie_on_such_a_target_either(f16_engine, prompts):
    tokens = f16_engine.tokens_of(texts(prompts)[0], chat=False)
    answer = f16_engine.generate(tokens, 20, depth=0, past_end=True).tokens
    for at in (3, 12):
        other = (answer[at] + 1) % 384
        judgement = judge(f16_engine, tokens, answer[:at], (answer[at], other), width=8)
        assert not judgement.is_tie
        assert judgement.candidates[0].token == answer[at]
        flat = Sampling(temperature=0.8)
        drawn = f16_engine.generate(tokens, at + 1, sampling=flat, seed=5, depth=0, past_end=True).tokens
        rivals = (drawn[at], (drawn[at] + 1) % 384)
        assert not judge(f16_engine, tokens, drawn[:at], rivals, width=8, sampling=flat, seed=5).is_tie


def test_a_text_that_ends_sooner_differs():
    assert first_difference([5, 6, 7], [5, 6]) == Difference(2, 7, END)
    assert first_difference([5], [5, 9]) == Difference(1, END, 9)
    assert first_difference([5, 6], [5, 6]) is None


def test_prompts_that_do_not_fit_are_named(engine):
    outcome = verify(engine, builtin_prompts(["prose"]), settings=GREEDILY, n_tokens=10, n_ctx=300)
    assert "prose-9" in outcome.left_out and len(outcome.comparisons) + len(outcome.left_out) == 9


def test_settings_take_turns(engine):
    flat = tuple(Setting(Sampling(temperature=1.0), mode) for mode in ("coupled", "match"))
    outcome = verify(engine, texts(["a = 1\n", "b = 2\n"]), settings=(*GREEDILY, *flat), n_tokens=20, depths=(None, 3))
    assert [(one.prompt, str(one.setting), one.depth) for one in outcome.comparisons] == [
        ("own-1", "greedy", None),
        ("own-1", "greedy", 3),
        ("own-1", "T=1; coupled", None),
        ("own-1", "T=1; coupled", 3),
        ("own-2", "greedy", None),
        ("own-2", "greedy", 3),
        ("own-2", "T=1; match", None),
        ("own-2", "T=1; match", 3),
    ]
    assert outcome.unchanged


@pytest.fixture(scope="module")
def plain_server(target_path, tmp_path_factory):
    program = build(stock=True, targets=("server",)).server
    with LlamaServer(program, server_arguments(target_path), tmp_path_factory.mktemp("plain") / "log") as server:
        yield server


def test_a_stock_server_is_verified_by_its_url(pair, plain_server, tmp_path):
    program = build(stock=True, targets=("server",)).server
    with LlamaServer(program, server_arguments(*pair), tmp_path / "log") as server:
        alone = run("none", "--url", server.url, "--limit", 1, "-n", 40)
        beside = run("none", "--url", server.url, "--reference-url", plain_server.url, "--limit", 2, "-n", 40)
    assert alone.returncode == 0, alone.stderr
    assert "Sampled texts are left out" in alone.stderr
    assert "200 tokens are equal" in alone.stdout
    assert beside.returncode == 0, beside.stdout + beside.stderr
    assert "T=1 " in beside.stdout and "The output is unchanged" in beside.stdout


def test_the_patched_server_s_seeds_are_verified_without_another(pair, patched, tmp_path):
    with LlamaServer(patched.server, server_arguments(*pair), tmp_path / "log") as server:
        output = tmp_path / "result.json"
        done = run("none", "--url", server.url, "--limit", 2, "-n", 40, "--json", output)
    assert done.returncode == 0, done.stdout + done.stderr
    result = read_result(output)
    assert {row["setting"] for row in result.rows} > {"greedy", "T=1"}
    assert result.engine["engine"] == "llama-server" and result.models == ()


def test_another_model_behind_the_reference_url_is_found(pair, patched, demo, tmp_path):
    """So the comparison over URLs compares."""
    other = scaled_target(demo.target, parameters=0, weights="q4_0")
    with (
        LlamaServer(patched.server, server_arguments(*pair), tmp_path / "a") as server,
        LlamaServer(patched.server, server_arguments(other), tmp_path / "b") as reference,
    ):
        done = run("none", "--url", server.url, "--reference-url", reference.url, "--limit", 1, "-n", 60)
    assert done.returncode == 1
    assert "DIFFERENT" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "give TARGET and DRAFTER"),
        (("--url", "http://127.0.0.1:1", "--exact"), "--exact and --verify rejection need the files"),
        (("--depth", "0", "--url", "x"), "neither a number of drafts nor most or auto"),
    ],
)
def test_wrong_command_lines_are_usage_errors(arguments, said):
    done = run("none", *arguments)
    assert done.returncode == 2
    assert said in done.stderr


def test_own_prompts_come_from_a_file(pair, tmp_path):
    file = tmp_path / "own.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"def f{n}(x):\n"}) + "\n" for n in range(3)))
    output = tmp_path / "result.json"
    done = run("none", *pair, "-t", 1, "--prompts", file, "-n", 20, "--verify", "match", "--json", output)
    assert done.returncode == 0, done.stderr
    assert {row["prompt"] for row in read_result(output).rows} == {"own-1", "own-2", "own-3"}


@pytest.mark.skipif(not FULL, reason="minutes; DFLASH2_FULL=1 runs it")
@pytest.mark.parametrize("library", ["stock", "patched"])
def test_everything_on_either_library(pair, patched, library, tmp_path):
    output = tmp_path / "result.json"
    where = "stock" if library == "stock" else patched.libraries
    depths = ("--depth", "most", "--depth", "auto", "--depth", 1, "--depth", 4)
    done = run("none", *pair, "-t", 1, "--every-setting", *depths, "--limit", 4, "--json", output, library=where)
    assert done.returncode == 0, done.stdout + done.stderr
    result = read_result(output)
    assert result.engine["library"] == library
    assert result.summary["near_ties"] == 0 and result.summary["tokens_equal"] > 60_000
    done = run("none", *pair, "-t", 1, "--verify", "rejection", "--limit", 4, library=where)
    assert done.returncode == 0, done.stdout


def test_sampled_near_ties_name_what_each_evaluation_chooses(f16_engine):
    """A seed's token for the very row that the run saw is the run's own."""
    assert isinstance(f16_engine, PythonEngine)
    tokens = f16_engine.tokens_of(builtin_prompts(["code"])[0], chat=False)
    flat = Sampling(temperature=1.0)
    drawn = f16_engine.generate(tokens, 6, sampling=flat, seed=9, depth=0, past_end=True).tokens
    judgement = judge(f16_engine, tokens, drawn[:5], (drawn[5], drawn[5]), width=4, sampling=flat, seed=9)
    assert judgement.is_tie and f"give the tokens [{drawn[5]}]" in judgement.reason
    assert len(judgement.evaluations) == 5
