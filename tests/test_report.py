"""`dflash2 report`: the page holds the numbers of the files, runs nothing from them, and a real browser shows it."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from generation import EXACT

from dflash2.errors import EvidenceError
from dflash2.evidence import Variant, analyze, bench_rows, builtin_prompts, html, measure, opened, read_section
from dflash2.evidence.report.charts import charts
from dflash2.evidence.results import Result, write_result

ROOT = Path(__file__).parents[1]
SAVED = ROOT / "benchmarks" / "results" / "analyze-demo-pair.json"
OPTIONS = {name: value for name, value in EXACT.items() if name != "verbose"}
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SCRIPT = "<script>document.title = 'ran'</script>"
N_LATTICES = 3


@pytest.fixture(scope="module")
def engine(target_path, exact_drafters):
    with opened(target_path, exact_drafters["v2"], OPTIONS) as engine:
        yield engine


@pytest.fixture(scope="module")
def analysis(engine):
    return analyze(engine, builtin_prompts(["code"], most=1), n_tokens=30, n_lattices=N_LATTICES)


@pytest.fixture(scope="module")
def with_lattices(analysis, tmp_path_factory):
    """The saved result with lattices of the real pair; a prompt and a candidate are named to break out of the page."""
    data = json.loads(SAVED.read_text(encoding="utf-8"))
    rows = json.loads(json.dumps([{"kind": "lattice", **asdict(one)} for one in analysis.lattices]))
    rows[0]["prompt"] = SCRIPT
    rows[0]["positions"][0]["candidates"][0]["text"] = SCRIPT
    path = tmp_path_factory.mktemp("analysis") / "with-lattices.json"
    path.write_text(json.dumps({**data, "rows": data["rows"] + rows}), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def bench_file(engine, tmp_path_factory):
    prompts = builtin_prompts(["code"], most=2)
    plain, drafting = Variant("no drafting", engine, 0), Variant("the pair", engine)
    measured = measure(plain, (drafting,), prompts, n_tokens=20, n_ctx=engine.llm.n_ctx())
    path = tmp_path_factory.mktemp("bench") / "bench.json"
    write_result(Result("bench", engine.about(), (), {"tokens": 20}, bench_rows(measured, prompts), {}), path)
    return path


def page_of(*paths: Path) -> str:
    return html([read_section(path) for path in paths])


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-c", "from dflash2.cli import main; main()", "report"]
    return subprocess.run([*program, *map(str, arguments)], capture_output=True, text=True, check=False)


def test_the_page_holds_the_numbers_of_the_file(tmp_path):
    output = tmp_path / "page.html"
    done = command(SAVED, "-o", output)
    assert done.returncode == 0 and str(output) in done.stdout.replace("\n", ""), done.stderr
    page, data = output.read_text(encoding="utf-8"), json.loads(SAVED.read_text(encoding="utf-8"))
    positions = [row for row in data["rows"] if row["kind"] == "position"]
    assert len(positions) == 7
    for row in positions:
        cells = "".join(f"<td>{row['recall'][k - 1]:.1%}</td>" for k in (1, 2, 4, 8, 16))
        assert f"<tr><td>{row['position']}</td>{cells}</tr>" in page
        for k, share in enumerate(row["recall"], 1):
            assert f"<title>position {row['position']}: {k}, {share:.4f}</title>" in page
    for value in (data["machine"]["processor"], data["versions"]["numpy"], data["models"][1]["sha256"], data["made"]):
        assert value in page


def test_the_page_needs_no_other_file(with_lattices, bench_file):
    page = page_of(with_lattices, bench_file)
    assert page.count("<svg") == 3 + N_LATTICES + 3
    assert not re.search(r"\b(?:src|href|srcset|action)\s*=|url\(|@import|https?://", page)


def test_what_comes_from_a_file_is_text(with_lattices):
    page = page_of(with_lattices)
    assert SCRIPT not in page and "&lt;script&gt;document.title" in page
    assert page.count("<script>") == 1  # ours


def test_characters_that_steer_are_spelt_out(tmp_path):
    data = json.loads(SAVED.read_text(encoding="utf-8"))
    data["conditions"]["name"] = "a\u202eb\ud800\x1b"
    path = tmp_path / "steers.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    assert r"a\u202eb\ud800\x1b" in page_of(path).encode("utf-8").decode("utf-8")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 99}, "has schema 99"),
        ({"command": "tune"}, "is a result of 'tune'; a report shows those of analyze, bench, parity, verify"),
        ({"rows": [{"kind": "position"}]}, "are not those that dflash2 analyze writes"),
        ({"rows": ["text"]}, "are not those that dflash2 analyze writes"),
        ({"conditions": ["threads"]}, "are not those that dflash2 analyze writes"),
        ({"machine": None}, "is no result of dflash2"),
    ],
)
def test_a_wrong_file_is_one_sentence(tmp_path, change, message):
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps({**json.loads(SAVED.read_text(encoding="utf-8")), **change}), encoding="utf-8")
    with pytest.raises(EvidenceError, match=message):
        read_section(path)


def test_the_command_fails_in_one_sentence_and_leaves_the_old_page(tmp_path):
    output, wrong = tmp_path / "page.html", tmp_path / "wrong.json"
    output.write_text("old")
    wrong.write_text("no JSON")
    done = command(SAVED, wrong, "-o", output)
    assert done.returncode == 1 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert "is no result of dflash2" in done.stderr and output.read_text() == "old"


def test_kept_cycles_are_those_of_generation(analysis, engine):
    """Each starts behind what the last one accepted, and its lattice is what the runtime drafts there."""
    (prompt,) = builtin_prompts(["code"], most=1)
    tokens = engine.tokens_of(prompt, chat=False)
    text = engine.generate(tokens, 37, depth=0).tokens
    engine.llm.depth = engine.most
    lattices = engine.llm.lattices([*tokens, *text], [len(tokens) + first for first in range(30)])
    reached = 0
    assert len(analysis.lattices) == N_LATTICES
    for cycle in analysis.lattices:
        assert (cycle.prompt, cycle.token) == (prompt.id, reached)
        assert cycle.anchor == engine.text_of([text[reached]])
        wanted = [position.wanted for position in cycle.positions]
        assert wanted == list(text[reached + 1 : reached + 8])
        lattice = lattices[reached]
        assert [position.path for position in cycle.positions] == lattice.tokens.tolist()
        assert [[one.token for one in position.candidates] for position in cycle.positions] == lattice.ids.tolist()
        assert np.allclose([sum(one.q for one in position.candidates) for position in cycle.positions], 1)
        of_path = [one.q for at in cycle.positions for one in at.candidates if one.token == at.path]
        assert np.allclose(of_path, lattice.q)
        reached += 1 + cycle.accepted


def test_pictures_of_a_bench_add_up(bench_file):
    result = read_section(bench_file).result
    speed, acceptance, cycle = charts(result)
    (row,) = (row for row in result.rows if row["kind"] == "variant")
    assert speed.bars == ("no drafting", "the pair")
    assert speed.series[0].y == (row["plain_tokens_per_second"], row["tokens_per_second"])
    assert acceptance.series[0].y == tuple(row["acceptance_at"])
    assert {one.name: one.y for one in cycle.series} == {stage: (ms,) for stage, ms in row["stage_ms"].items()}
    assert f"{row['tokens_per_second']:.1f}" in page_of(bench_file)


def test_a_browser_shows_pictures_and_the_chosen_lattice(with_lattices, bench_file, tmp_path):
    if CHROMIUM is None:
        pytest.skip("no chromium")
    from PIL import Image

    page, picture = tmp_path / "page.html", tmp_path / "page.png"
    page.write_text(page_of(with_lattices, bench_file), encoding="utf-8")
    options = (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        f"--user-data-dir={tmp_path / 'profile'}",
    )
    size = ("--window-size=1100,3200", "--hide-scrollbars")
    dump = [CHROMIUM, *options, "--dump-dom", page.as_uri()]
    dom = subprocess.run(dump, capture_output=True, text=True, timeout=60, check=True)
    assert "<title>DFlash 2 report</title>" in dom.stdout, dom.stderr  # the script of the file did not run
    assert re.findall(r'<div class="lattice"( hidden="")?>', dom.stdout) == ["", *[' hidden=""'] * (N_LATTICES - 1)]
    first = dom.stdout.split('<div class="lattice"')[1]
    assert len(re.findall(r'<rect class="candidate', first)) == 7 * 16
    assert len(re.findall(r'<rect class="candidate chosen', first)) == 7
    subprocess.run([CHROMIUM, *options, *size, f"--screenshot={picture}", page.as_uri()], check=True, timeout=60)
    pixels = np.asarray(Image.open(picture).convert("RGB")).reshape(-1, 3)
    for name, colour in {"the recall curve": (0x33, 0x66, 0xAA), "the path's boxes": (0xBC, 0xD4, 0xF2)}.items():
        assert (pixels == colour).all(axis=1).sum() > 500, name


def test_png_files(bench_file, tmp_path):
    pytest.importorskip("matplotlib")
    from PIL import Image

    done = command(SAVED, bench_file, "-o", tmp_path / "page.html", "--png", tmp_path / "pictures")
    assert done.returncode == 0, done.stderr
    names = ("1-analyze-recall", "1-analyze-acceptance", "1-analyze-calibration")
    names += ("2-bench-speed", "2-bench-acceptance", "2-bench-cycle")
    assert {path.stem for path in (tmp_path / "pictures").iterdir()} == set(names)
    for name in names:
        with Image.open(tmp_path / "pictures" / f"{name}.png") as image:
            assert len(image.convert("RGB").getcolors(1 << 20)) > 50


def test_png_files_without_matplotlib_are_one_sentence(tmp_path, monkeypatch):
    from dflash2.evidence import write_pngs

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(EvidenceError, match=r"pip install 'llama-dflash2\[report\]'"):
        write_pngs([read_section(SAVED)], tmp_path)
