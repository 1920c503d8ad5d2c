"""`dflash2 analyze`: its arithmetic, and that it sees what the runtime does."""

import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from generation import EXACT

from dflash2.errors import ContextLimitError, Dflash2Error, EvidenceError
from dflash2.evidence import Bin, Observed, analyze, builtin_prompts, opened, read_result, summarize, texts
from dflash2.evidence.analyze import calibrate
from dflash2.gguf_info import read_gguf_info

OPTIONS = {name: value for name, value in EXACT.items() if name != "verbose"}
N_TOKENS = 60


@pytest.fixture(scope="module", params=["v2", "v1"])
def engine(request, target_path, exact_drafters):
    with opened(target_path, exact_drafters[request.param], OPTIONS) as engine:
        yield engine


@pytest.fixture(scope="module")
def with_selector(engine):
    return "selector_hidden.weight" in read_gguf_info(Path(engine.llm.drafter_path)).tensor_names


@pytest.fixture(scope="module")
def prompts_of_sets():
    return builtin_prompts(["code", "prose", "maths"], most=2)


@pytest.fixture(scope="module")
def analysis(engine, prompts_of_sets):
    return analyze(engine, prompts_of_sets, n_tokens=N_TOKENS)


@pytest.fixture
def text():
    """Four anchors, two drafted positions, three candidates; the target counts 1, 2, 3, 4, 5."""
    return Observed(
        wanted=np.array([[1, 2], [2, 3], [3, 4], [4, 5]], np.int32),
        ids=np.array(
            [
                [[1, 9, 8], [9, 2, 8]],  # the second is fixed
                [[2, 9, 8], [3, 9, 8]],  # the first is spoiled, so the second does not count
                [[9, 3, 8], [9, 8, 4]],  # the first is fixed, the second is right nowhere but among the candidates
                [[9, 8, 7], [5, 8, 7]],  # nothing to be had
            ],
            np.int32,
        ),
        path=np.array([[1, 2], [9, 3], [3, 9], [9, 5]], np.int32),
        q=np.array([[0.9, 0.5], [0.4, 1.0], [0.7, 0.2], [0.3, 1.0]]),
    )


def test_recall_counts_every_anchor(text):
    first, second = summarize([text]).positions
    assert first.recall == (0.5, 0.75, 0.75)
    assert second.recall == (0.5, 0.75, 1.0)


def test_fixed_and_spoiled_count_where_the_path_is_right_so_far(text):
    first, second = (asdict(one) for one in summarize([text]).positions)
    names = ("position", "n", "top_1_right", "path_right", "fixed", "spoiled")
    assert [first[name] for name in names] == [1, 4, 2, 2, 1, 1]
    assert [second[name] for name in names] == [2, 2, 0, 1, 1, 0]


def test_accepted_lengths_are_those_of_each_draft_and_those_of_a_chain_of_cycles(text):
    found = summarize([text])
    assert asdict(found.everywhere) == {"top_1": 7 / 4, "path": 7 / 4, "oracle": 10 / 4}
    # Top-1: 2 of anchor 0, 1 of anchor 2, 1 of anchor 3. Path: 3 of anchor 0, 1 of anchor 3. Oracle: the same.
    assert asdict(found.in_cycles) == {"top_1": 4 / 3, "path": 4 / 2, "oracle": 4 / 2}
    assert found.n_texts == 1 and found.n_anchors == 4


def test_a_cycle_does_not_reach_into_the_next_text(text):
    twice = summarize([text, text])
    assert twice.n_texts == 2 and twice.in_cycles == summarize([text]).in_cycles


def test_q_is_calibrated_up_to_the_first_wrong_token(text):
    found = summarize([text]).calibration
    assert found.n == 6
    rounded = [tuple(round(value, 6) for value in vars(one).values()) for one in found.bins]
    assert rounded == [
        (0.2, 0.3, 1, 0.2, 0.0),
        (0.3, 0.4, 1, 0.3, 0.0),
        (0.4, 0.5, 1, 0.4, 0.0),
        (0.5, 0.6, 1, 0.5, 1.0),
        (0.7, 0.8, 1, 0.7, 1.0),
        (0.9, 1.0, 1, 0.9, 1.0),
    ]
    assert found.error == pytest.approx((0.2 + 0.3 + 0.4 + 0.5 + 0.3 + 0.1) / 6)


def test_the_calibration_error_weighs_bins_by_what_is_in_them():
    found = calibrate(np.array([0.75, 0.75, 0.75, 1.0]), np.array([True, True, False, True]))
    assert found.bins == (Bin(0.7, 0.8, 3, 0.75, 2 / 3), Bin(0.9, 1.0, 1, 1.0, 1.0))
    assert found.error == pytest.approx(3 / 4 * (0.75 - 2 / 3))


def test_the_path_accepts_what_the_runtime_accepts(engine, analysis, prompts_of_sets):
    """Cycle for cycle: the runtime's last one begins at the last anchor or before."""
    cycles = accepted = 0
    for prompt in prompts_of_sets:
        stats = engine.generate(engine.tokens_of(prompt, chat=False), N_TOKENS + 1).stats
        cycles, accepted = cycles + stats.cycles, accepted + stats.accepted
    assert analysis.n_anchors == N_TOKENS * len(prompts_of_sets)
    assert analysis.in_cycles.path == (cycles + accepted) / cycles > 2


def test_a_lattice_s_path_is_the_runtime_s_proposal(engine, prompts_of_sets):
    prompt, records = engine.tokens_of(prompts_of_sets[0], chat=False), []
    engine.llm.on_cycle = records.append
    try:
        answer = engine.generate(prompt, N_TOKENS).tokens
    finally:
        engine.llm.on_cycle = None
    records = [record for record in records if record.position < len(prompt) + len(answer)]
    found = engine.llm.lattices([*prompt, *answer], [record.position for record in records])
    assert len(records) > 10
    assert [tuple(lattice.tokens.tolist()) for lattice in found] == [record.proposal for record in records]


def test_candidates_are_ranked_by_the_drafter_s_logits(engine, prompts_of_sets):
    prompt = engine.tokens_of(prompts_of_sets[0], chat=False)
    (lattice,) = engine.llm.lattices(prompt, [len(prompt) - 1])
    assert lattice.ids.shape == lattice.logits.shape == (7, 16)
    assert (np.diff(lattice.logits, axis=1) <= 0).all() and lattice.logits[0, 0] > lattice.logits[0, 15]
    assert all(len(set(row)) == 16 for row in lattice.ids.tolist())
    assert all(token in row for token, row in zip(lattice.tokens, lattice.ids, strict=True))
    assert ((lattice.q >= 1 / 16) & (lattice.q <= 1)).all()  # the likeliest of 16 after its predecessor


def test_recall_grows_with_k_and_bounds_what_is_accepted(analysis, with_selector):
    for one in analysis.positions:
        assert list(one.recall) == sorted(one.recall) and one.recall[0] < one.recall[-1]
        assert one.path_right - one.top_1_right == one.fixed - one.spoiled
    first = analysis.positions[0]
    assert first.recall[0] == first.top_1_right / first.n
    lengths = analysis.everywhere
    assert lengths.oracle > lengths.path >= lengths.top_1
    assert (lengths.path > lengths.top_1) is any(one.fixed for one in analysis.positions) is with_selector


def test_a_stride_takes_every_so_many_anchors(engine, prompts_of_sets):
    found = analyze(engine, prompts_of_sets[:1], n_tokens=N_TOKENS, stride=7)
    assert found.n_anchors == 9 and found.in_cycles is None


def test_prompts_that_do_not_fit_are_named(engine, prompts_of_sets):
    long = texts(["x = 1\n" * 200])
    assert analyze(engine, [*long, prompts_of_sets[0]], n_tokens=5).left_out == ("own-1",)
    with pytest.raises(EvidenceError, match="raise the context"):
        analyze(engine, long, n_tokens=5)


def test_anchors_that_cannot_be_are_refused(engine):
    with pytest.raises(Dflash2Error, match=r"ascending positions in 1\.\.3"):
        engine.llm.lattices([1, 2, 3, 4], [2, 2])
    with pytest.raises(ContextLimitError, match="does not fit the context of 512"):
        engine.llm.lattices([1] * 512, [505])
    engine.llm.depth = 0
    with pytest.raises(Dflash2Error, match="drafting is switched off"):
        engine.llm.lattices([1, 2], [1])
    engine.llm.depth = engine.most


def test_the_command_shows_tables_and_writes_them_down(target_path, exact_drafters, tmp_path):
    output = tmp_path / "result.json"
    options = ("-t", "1", "--category", "code", "--limit", "2", "-n", "30", "--json", output)
    program = [sys.executable, "-c", "from dflash2.cli import main; main()"]
    command = [*program, "analyze", target_path, exact_drafters["v2"], *options]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = read_result(output, "analyze")
    assert result.summary["texts"] == 2 and result.summary["anchors"] == 60
    positions = [row for row in result.rows if row["kind"] == "position"]
    assert [row["position"] for row in positions] == [1, 2, 3, 4, 5, 6, 7]
    assert all(len(row["recall"]) == 16 for row in positions) and positions[0]["n"] == 60
    assert sum(row["n"] for row in result.rows if row["kind"] == "bin") == sum(row["n"] for row in positions)
    for name in ("top_1", "path", "oracle"):
        assert f"{result.summary['accepted_length'][name]:.2f}" in done.stdout
    assert f"{positions[6]['recall'][15]:.1%}" in done.stdout
    assert f"{result.summary['calibration_error']:.3f}" in done.stdout


def test_the_documented_figures_are_those_of_the_result_files():
    root = Path(__file__).parents[1]
    page = (root / "docs" / "analyzing.md").read_text(encoding="utf-8")
    expected = []
    for name, file in (("DFlash 2", "analyze-demo-pair.json"), ("v1", "analyze-demo-pair-v1.json")):
        result = read_result(root / "benchmarks" / "results" / file, "analyze")
        summary = result.summary
        assert summary["texts"] == 46 and summary["anchors"] == 4600
        for what, key in (("from every draft", "accepted_length"), ("in cycles", "accepted_length_in_cycles")):
            expected.append([name, what, *(f"{length:.2f}" for length in summary[key].values())])
        error = f"{summary['calibration_error']:.3f}"
        assert (f"The error is {error}" if name == "DFlash 2" else f"(v1: {error})") in page
        if name == "DFlash 2":
            expected += [_documented(row) for row in result.rows]
            expected += [
                [str(row["position"]), *(f"{row['recall'][k - 1]:.1%}" for k in (1, 2, 4, 8, 16))]
                for row in result.rows
                if row["kind"] == "position"
            ]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:1] == "|"]
    documented = [row for row in rows if row[1][:1].isdigit() or row[1] in ("from every draft", "in cycles")]
    assert sorted(documented) == sorted(expected)


def _documented(row):
    if row["kind"] == "bin":
        return [f"{row['low']:.1f}-{row['high']:.1f}", str(row["n"]), f"{row['mean_q']:.3f}", f"{row['right']:.3f}"]
    counts = (row[name] for name in ("top_1_right", "path_right", "fixed", "spoiled"))
    return [str(row["position"]), str(row["n"]), *(f"{count / row['n']:.1%}" for count in counts)]
