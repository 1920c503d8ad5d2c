"""Measuring the kernel table: the program that times, and what is read out of its times."""

import stat

import pytest
from host_programs import compile_program
from test_dispatch_table import DISPATCH

from dflash2.builds import Build
from dflash2.commands.patches import measure_table
from dflash2.errors import BuildError
from dflash2.patches import build
from dflash2.patches.dispatch import PROGRAM, TABLE, Entry, Timing, choose, measure


def timings(name, vector, matrix):
    """Times of 2 to 8 rows."""
    pairs = zip(range(2, 9), vector, matrix, strict=True)
    return [Timing(name, rows, few, many) for rows, few, many in pairs]


@pytest.fixture(scope="module")
def program(llama_cpp_source, tmp_path_factory):
    """Folder of the measuring program, built against the stock library."""
    folder = tmp_path_factory.mktemp("measure")
    include = [llama_cpp_source / "ggml" / "include"]
    compile_program(folder / PROGRAM, [DISPATCH / "dflash2-measure.cpp"], include)
    return folder


def recorded(folder, text, status=0):
    """A program that prints recorded lines of a card that this machine does not have."""
    folder.mkdir()
    script = folder / PROGRAM
    lines = "".join(f"printf '%s\\n' '{line}'\n" for line in text.splitlines())
    script.write_text(f"#!/bin/sh\n{lines}exit {status}\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return folder


def test_the_split_with_the_least_total_time_is_chosen():
    rising = [100, 150, 200, 250, 300, 350, 400]
    assert choose(timings("q4_K", rising, [210] * 7)) == 4
    assert choose(timings("q4_K", rising, [90] * 7)) == 1
    assert choose(timings("q4_K", rising, [500] * 7)) == 8
    # A dip in the middle is worth less than what follows it.
    assert choose(timings("q4_K", [100] * 7, [200, 200, 90, 200, 200, 200, 200])) == 8


def test_a_gain_below_two_per_cent_changes_nothing():
    assert choose(timings("q8_0", [100] * 7, [100, 100, 100, 100, 100, 100, 90])) == 8
    assert choose(timings("q8_0", [100] * 7, [100, 100, 100, 100, 100, 100, 80])) == 7


def test_the_program_times_every_row_count_of_the_types_asked_for(program, tmp_path):
    options = ["--device", "CPU", "--size", "512x64", "--types", "q4_0,q6_K", "--milliseconds", "0.2"]
    seen = []
    measured = measure(program, "cuda", tmp_path / "t.txt", options=options, progress=lambda *step: seen.append(step))
    assert seen == [(name, rows) for name in ("q4_0", "q6_K") for rows in range(1, 9)]
    assert [(timing.type, timing.rows) for timing in measured.timings] == seen
    assert all(timing.vector > 0 and timing.matrix > 0 for timing in measured.timings)
    assert measured.device == "*"
    assert [entry.type for entry in measured.entries] == ["q4_0", "q6_K"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "no device here has a dispatch table"),
        (["--device", "CUDA7"], "there is no device CUDA7"),
        (["--device", "CPU", "--size", "100x10"], "--size is COLUMNSxROWS"),
        (["--device", "CPU", "--types", "q9_0"], "no quantised type q9_0"),
        (["--device"], "--device has no value"),
        (["--speed", "9"], "unknown option --speed"),
    ],
)
def test_what_cannot_be_measured_is_said_in_one_sentence(program, tmp_path, options, said):
    with pytest.raises(BuildError, match=said):
        measure(program, "cuda", tmp_path / "t.txt", options=options)
    assert not (tmp_path / "t.txt").exists()


def test_a_folder_without_the_program(tmp_path):
    with pytest.raises(BuildError, match=f"no {PROGRAM} in"):
        measure(tmp_path, "cuda")


def test_the_table_has_the_devices_number_and_the_times_behind_each_entry(tmp_path):
    rows = [f"time\tq4_K\t{n}\t{50 * n}.00\t120.00" for n in range(1, 9)]
    rows += [f"time\tq8_0\t{n}\t60.00\t120.00" for n in range(1, 9)]
    folder = recorded(tmp_path / "bin", "\n".join(["device\t860\tNVIDIA GeForce RTX 3090", *rows]))
    measured = measure(folder, "cuda")
    assert measured.entries == (Entry("cuda", "860", "q4_K", 2), Entry("cuda", "860", "q8_0", 8))
    text = (folder / TABLE).read_text()
    assert text == measured.render()
    assert "cuda 860 mul_mat q4_K 2\n" in text
    assert "# q4_K: 100/120 150/120 200/120 250/120 300/120 350/120 400/120\n" in text
    assert text.startswith("# NVIDIA GeForce RTX 3090: ")
    assert {path.name for path in folder.iterdir()} == {PROGRAM, TABLE}


def test_the_program_is_a_target_of_the_patched_build(tmp_path):
    made = build(targets=("measure",))
    options = ["--device", "CPU", "--size", "256x64", "--types", "q4_0", "--milliseconds", "0.2"]
    measured = measure(made.libraries, "cuda", tmp_path / "table.txt", options=options)
    assert [timing.rows for timing in measured.timings] == [*range(1, 9)]
    with pytest.raises(BuildError, match=r"stock llama\.cpp has no kernel table"):
        build(stock=True, targets=("measure",))


def test_the_command_says_the_limits_and_where_the_table_is(tmp_path, capsys):
    rows = [f"time\tq4_K\t{n}\t{50 * n}.00\t120.00" for n in range(1, 9)]
    (tmp_path / "tree").mkdir()
    recorded(tmp_path / "tree" / "bin", "\n".join(["device\t900\tNVIDIA H200", *rows]))
    made = Build(tmp_path, "key", "base", False, "cuda", False, "", ("measure",), 1, "", 0.0)
    measure_table(made)
    assert capsys.readouterr().out.splitlines() == [
        "NVIDIA H200: rows for the kernel of few: q4_K 2",
        f"In effect in everything that loads this build: {made.libraries / TABLE}",
    ]
    assert "cuda 900 mul_mat q4_K 2\n" in (made.libraries / TABLE).read_text()
