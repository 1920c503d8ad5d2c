"""The kernel table of the GPU backends: its host code, compiled from the patched sources, with and without entries."""

import shutil
import subprocess
from pathlib import Path

import pytest
from host_programs import CPP, PATCHES, compile_program, run_program

from dflash2.patches.dispatch import TABLE, Entry, Measurement, Timing, choose

DISPATCH = PATCHES / "src" / "ggml" / "src"
CAPABILITIES = (610, 700, 750, 800, 860, 870, 890, 900, 1200, 1210, 0x1000000 + 0x942)
K_QUANTS = {"q2_K": 5, "q3_K": 6, "q4_K": 5, "q5_K": 6, "q6_K": 7}
BUILT_IN = {750: {}, 800: K_QUANTS, 860: {"q4_0": 7, "q8_0": 7, **K_QUANTS}}  # below 8 rows, upstream's limit
OFF = {"DFLASH2_NO_DISPATCH": "1"}


def patched_copy(source: Path, patch: str, folder: Path) -> Path:
    """The files that one patch changes, before it in `folder`/stock and after it in `folder`/patched."""
    text = (PATCHES / patch).read_text()
    names = [line.split(" b/")[1] for line in text.splitlines() if line.startswith("diff --git ")]
    for tree in ("stock", "patched"):
        for name in names:
            (folder / tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, folder / tree / name)
    command = ["patch", "-p1", "-F0", "-s", "-i", str(PATCHES / patch)]
    subprocess.run(command, cwd=folder / "patched", check=True)
    return folder


def host_part(mmvq: Path, common: Path) -> str:
    """Limits and decisions out of mmvq.cu, and the names of the architectures out of common.cuh."""
    defines = [line for line in common.read_text().splitlines() if line.startswith("#define GGML_CUDA_CC_")]
    text = mmvq.read_text()
    begin = text.index("// Per-architecture maximum batch size")
    end = text.index("// Device constexpr: returns the max batch size")
    return "\n".join(defines) + "\n" + text[begin:end]


@pytest.fixture(scope="module")
def decide(llama_cpp_source, tmp_path_factory):
    """Runs the decisions of the stock or the patched source: {(capability, type): [(mmvq, expert rows) of 1..16]}.

    `measured` is the table that lies beside the program.
    """
    folder = tmp_path_factory.mktemp("decisions")
    trees = patched_copy(llama_cpp_source, "backend/0001-cuda-dispatch.patch", folder)
    cuda = llama_cpp_source / "ggml" / "src" / "ggml-cuda"
    programs = {}
    for tree in ("stock", "patched"):
        include = trees / tree
        mmvq = include / "ggml" / "src" / "ggml-cuda" / "mmvq.cu"
        (include / "decisions.inc").write_text(host_part(mmvq, cuda / "common.cuh"))
        # Of our directory before the shim's: dflash2-dispatch.cu finds its own header next to it.
        paths = [include, DISPATCH / "ggml-cuda", CPP / "cuda_shim", llama_cpp_source / "ggml" / "include"]
        flags = ["-DPATCHED"] if tree == "patched" else []
        program = trees / f"{tree}-decisions"
        programs[tree] = compile_program(program, [CPP / "cuda_decisions.cpp"], paths, *flags)

    def run(tree="patched", environment=None, measured=""):
        (trees / TABLE).write_text(measured)
        out, said = run_program(programs[tree], *CAPABILITIES, environment=environment)
        table, more = {}, {}
        for line in out.splitlines():
            words = line.split()
            if len(words) == 5 and words[0].isdigit():
                table.setdefault((int(words[0]), words[1]), []).append((int(words[3]), int(words[4])))
            else:
                more[words[0] if words[0] != "forced" else line.split(":")[0]] = words[1:]
        return table, more, said

    return run


def mmvq_rows(decisions):
    """Rows up to which MMVQ is used; fails if it is used again above."""
    used = [use for use, _ in decisions]
    assert used == sorted(used, reverse=True)
    return sum(used)


def test_without_the_table_every_decision_is_upstreams(decide):
    stock, _, _ = decide("stock")
    patched, more, said = decide(environment=OFF)
    assert patched == stock
    assert len(stock) > 20 * len(CAPABILITIES)
    assert more["decided"] == ["0", "0"]
    assert said == ""


def test_built_in_entries_change_what_they_name_and_nothing_else(decide):
    stock, _, _ = decide("stock")
    patched, more, _ = decide()
    changed = {key: mmvq_rows(patched[key]) for key in stock if stock[key] != patched[key]}
    limits = {(device, name): rows for device, types in BUILT_IN.items() for name, rows in types.items()}
    assert changed == limits
    assert all(mmvq_rows(stock[key]) == 8 for key in limits)
    # Row counts of 2 to 8: of the named types on sm_86, of all that MMQ takes on sm_75 and sm_80; nothing else.
    for_few, for_many = map(int, more["decided"])
    assert for_many == sum(8 - rows for rows in limits.values())
    n_types = len({name for _, name in stock} - {"iq1_m", "tq1_0", "tq2_0"})
    assert for_few + for_many == 7 * (len(BUILT_IN[860]) + 2 * n_types)


def test_entries_of_the_user_go_over_the_built_in_ones(decide):
    given = "cuda 860 mul_mat q4_K 2; cuda * mul_mat q8_0 4;cuda 750 mul_mat q8_0 8; metal * mul_mat q5_0 1"
    stock, _, _ = decide("stock")
    patched, _, said = decide(environment={"DFLASH2_DISPATCH": given})
    assert said == ""
    assert mmvq_rows(patched[860, "q4_K"]) == 2
    assert mmvq_rows(patched[890, "q4_K"]) == mmvq_rows(stock[890, "q4_K"])
    assert [mmvq_rows(patched[cc, "q8_0"]) for cc in (750, 800, 860, 890)] == [8, 4, 4, 4]
    assert mmvq_rows(patched[860, "q5_0"]) == 8
    assert mmvq_rows(patched[860, "q6_K"]) == K_QUANTS["q6_K"]


def test_a_file_is_read_and_what_is_wrong_in_it_is_said_and_left_out(decide, tmp_path):
    table = tmp_path / "table.txt"
    table.write_text(
        "# measured\ncuda 750 mul_mat q4_0 3 # comment\n\ncuda 750 mul_mat q9_0 3\ncuda 750 mul_mat q4_1 9\n"
        "opencl 750 mul_mat q4_1 2\ncuda x mul_mat q4_1 2\ncuda 750 add q4_1 2\ncuda 750 mul_mat f16 2\n"
        "mul_mat q4_1 2\n"
    )
    patched, _, said = decide(environment={"DFLASH2_DISPATCH": str(table)})
    assert mmvq_rows(patched[750, "q4_0"]) == 3
    assert mmvq_rows(patched[750, "q4_1"]) == 8
    problems = ("q9_0", "1 to 8: 9", "opencl", "device x", "operation add", "type f16", "not five words")
    assert len(said.splitlines()) == len(problems)
    assert all(problem in line for problem, line in zip(problems, said.splitlines(), strict=True))


@pytest.mark.parametrize("given", ["/mistyped/path", "table.txt", "my tables/table.txt", "folder", "empty"])
def test_a_path_without_a_table_is_said_to_be_none(decide, tmp_path, monkeypatch, given):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty").touch()
    patched, _, said = decide(environment={"DFLASH2_DISPATCH": given})
    assert said.strip() == f"kernel table: DFLASH2_DISPATCH: no such file, or nothing in it: {given}"
    assert mmvq_rows(patched[860, "q4_K"]) == K_QUANTS["q4_K"]


@pytest.mark.parametrize(("value", "off"), [("1", True), ("yes", True), ("0", False), ("", False)])
def test_the_table_is_off_by_anything_but_nothing_and_zero(decide, value, off):
    patched, _, _ = decide(environment={"DFLASH2_NO_DISPATCH": value})
    assert mmvq_rows(patched[860, "q4_K"]) == (8 if off else K_QUANTS["q4_K"])


def test_a_measured_table_beside_the_library_is_used_without_being_named(decide):
    timings = tuple(Timing("q5_K", rows, 10.0 * rows, 25.0) for rows in range(1, 9))
    measured = Measurement("800", "NVIDIA A100", timings, (Entry("cuda", "800", "q5_K", choose(timings)),))
    patched, _, said = decide(measured=measured.render())
    assert said == ""
    assert mmvq_rows(patched[800, "q5_K"]) == 2
    assert mmvq_rows(patched[800, "q4_K"]) == K_QUANTS["q4_K"]
    # The user's own entries go over it, and without any it is ignored like all others.
    named, _, _ = decide(environment={"DFLASH2_DISPATCH": "cuda 800 mul_mat q5_K 4"}, measured=measured.render())
    assert mmvq_rows(named[800, "q5_K"]) == 4
    off, _, _ = decide(environment=OFF, measured=measured.render())
    assert mmvq_rows(off[800, "q5_K"]) == 8


def test_a_type_that_mmq_does_not_take_stays_where_it_is(decide):
    patched, _, _ = decide(environment={"DFLASH2_DISPATCH": "cuda * mul_mat * 1; cuda * mul_mat_id * 1"})
    assert mmvq_rows(patched[860, "iq1_m"]) == 8
    assert patched[860, "iq1_m"][0][1] == 8
    assert mmvq_rows(patched[860, "iq4_xs"]) == 1


def test_experts_rows_can_be_lowered_but_not_raised(decide):
    stock, _, _ = decide("stock")
    lowered, _, _ = decide(environment={"DFLASH2_DISPATCH": "cuda * mul_mat_id * 2"})
    raised, _, _ = decide(environment={"DFLASH2_DISPATCH": "cuda * mul_mat_id * 8"})
    assert stock[750, "q3_K"][0][1] == 5  # for which the kernel is compiled
    assert raised[750, "q3_K"][0][1] == 5
    assert lowered[750, "q3_K"][0][1] == lowered[890, "q4_0"][0][1] == 2


def test_what_the_backend_hands_out_by_name(decide):
    _, more, _ = decide()
    assert more["device"] == ["860", "750"]
    assert more["other"] == ["1"]
    assert more["forced 3"][-10:] == ["1", "1", "1", "0", "0", "0", "0", "0", "0", "3"]
    assert more["forced 100"][-10:] == ["1", "1", "1", "1", "1", "1", "1", "1", "0", "8"]
    assert more["forced -1"][-10:] == ["1", "1", "1", "1", "1", "1", "1", "1", "0", "8"]


@pytest.fixture(scope="module")
def metal(llama_cpp_source, tmp_path_factory):
    """Runs Metal's host part for two types: the first without entries of its own in what the tests give."""
    folder = tmp_path_factory.mktemp("metal")
    trees = patched_copy(llama_cpp_source, "backend/0002-metal-dispatch.patch", folder)
    upstream = llama_cpp_source / "ggml" / "src"
    common = trees / "patched" / "ggml" / "src" / "ggml-metal" / "ggml-metal-common.cpp"
    sources = [CPP / "metal_dispatch.cpp", common]
    include = [DISPATCH / "ggml-metal", upstream / "ggml-metal", upstream, llama_cpp_source / "ggml" / "include"]
    # What nothing here calls refers to files that only a Mac can compile.
    program = compile_program(trees / "metal", sources, include, "-ffunction-sections", "-Wl,--gc-sections")

    def run(given=None):
        environment = {} if given is None else {"DFLASH2_DISPATCH": given}
        out, said = run_program(program, 2, 12, environment=environment)  # Q4_0, Q4_K
        assert said == ""
        rows = [line.split() for line in out.splitlines()]
        assert [row[0] for row in rows] == ["q4_0", "q4_K"]
        return [("".join(row[1:11]), "".join(row[11:])) for row in rows]

    return run


def test_metal_decides_as_upstream_without_entries(metal):
    upstream = ("0000000011", "2345344")
    assert metal() == [upstream, upstream]
    assert metal("cuda * mul_mat q4_K 1") == [upstream, upstream]


def test_metals_rows_and_passes_follow_the_table(metal):
    assert metal("metal * mul_mat q4_K 4") == [("0000000011", "2345344"), ("0000111111", "2345344")]
    assert metal("metal * mul_mat q4_K 1; metal * pass q4_K 4")[1] == ("0111111111", "2343344")
    # Upstream's own choice is that of five at once.
    assert metal("metal * pass * 5") == [("0000000011", "2345344")] * 2
    assert metal("metal * pass * 3")[0] == ("0000000011", "2323333")
