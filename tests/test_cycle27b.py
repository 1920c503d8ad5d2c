"""The benchmark of the 27B pair, on a tiny copy of it and a CPU: files, measurement, arithmetic of the tables."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from dflash2 import DFlashLlama
from dflash2.gguf_info import read_gguf_info
from dflash2.patches import build

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import cycle27b
from backend_counts import Counts, counting
from cycle27b import Bar, Cost, Row, Run, acceptance, accepted_length, bars
from operator_times import Operators
from pair27b import Geometry, drafter_tensors, random_pair, target_tensors

TINY = Geometry.scaled(layers=4, width=512, vocabulary=4096)
SIZES = ["--layers", "4", "--width", "512", "--vocabulary", "4096"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return random_pair(TINY, tmp_path_factory.mktemp("pair"))


def matrices(path):
    """The quantised tensors of a file as floats."""
    info = read_gguf_info(path)
    data = np.memmap(path, np.uint8, "r")
    for tensor in info.tensors:
        if tensor.type_name != "F32":
            raw = data[tensor.offset : tensor.offset + tensor.n_bytes].reshape(tensor.shape[1], -1)
            yield tensor, dequantize(raw, GGMLQuantizationType[tensor.type_name])


def test_the_full_geometry_has_the_published_sizes():
    target, drafter = [*target_tensors(Geometry())], [*drafter_tensors(Geometry())]
    parameters = sum(int(np.prod(tensor.shape)) for tensor in target)
    assert 26.8e9 < parameters < 27.0e9
    assert len(drafter) == 81
    # The published Q4_K_M of the drafter has 1,138,229,248 bytes, a tokenizer of 8 MB among them.
    n_bytes = sum(int(np.prod(tensor.byte_shape)) for tensor in drafter)
    assert n_bytes == pytest.approx(1.1382e9, rel=0.01)
    # A recurrent snapshot of 149.6 MiB: the state and the last three rows of the convolution, in 48 layers.
    states = [t.shape for t in target if t.name.endswith(("ssm_dt.bias", "ssm_conv1d.weight"))]
    snapshot = sum(4 * (128 * 128 * shape[0] if len(shape) == 1 else 3 * shape[0]) for shape in states)
    assert snapshot / 2**20 == pytest.approx(149.6, abs=0.05)


def test_random_blocks_are_finite_centred_and_as_long_as_a_weight_is(pair):
    for path in pair:
        for tensor, values in matrices(path):
            assert np.isfinite(values).all(), tensor.name
            columns = tensor.shape[0]
            if tensor.name != "output.weight" and values.size > 100_000:
                assert abs(values.mean()) < 0.05 * columns**-0.5, tensor.name
                assert values.std() == pytest.approx(columns**-0.5, rel=0.05), tensor.name


def test_the_head_never_offers_the_end_of_the_text(pair):
    head = next(values for tensor, values in matrices(pair[0]) if tensor.name == "output.weight")
    assert not head[0].any()
    assert head[1:].any(axis=1).all()


def test_the_pair_drafts_in_the_runtime(pair):
    llm = DFlashLlama(*pair, n_ctx=128, depth=None, auto_disable=False, verbose=False, n_threads=1, n_threads_batch=1)
    stream = llm.generate(list(range(100, 130)), temp=0.0)
    tokens = [next(stream) for _ in range(8)]
    stream.close()
    assert all(1 < token < TINY.vocabulary for token in tokens)
    assert llm.stats.cycles > 0
    assert llm.stats.drafted == 7 * llm.stats.cycles
    llm.close()


@pytest.mark.parametrize(("layers", "width", "said"), [(6, 512, "come in fours"), (4, 500, "multiple of 256")])
def test_sizes_that_no_file_can_have_are_refused(layers, width, said):
    with pytest.raises(ValueError, match=said):
        Geometry.scaled(layers, width, 4096)


def test_a_pair_is_made_once(pair):
    made = [path.stat().st_mtime_ns for path in pair]
    assert random_pair(TINY, pair[0].parent) == pair
    assert [path.stat().st_mtime_ns for path in pair] == made


def test_one_probability_gives_the_length_of_every_width():
    probability = acceptance(5.0, 8)
    assert accepted_length(probability, 8) == pytest.approx(5.0)
    assert accepted_length(probability, 1) == 1
    assert accepted_length(0.5, 3) == 1.75
    assert acceptance(8.0, 8) == pytest.approx(1.0)


def test_a_cost_is_the_median_of_its_runs():
    runs = [Run(40, 10, ms, Counts(30, 30, 5, ms / 2)) for ms in (100.0, 300.0, 140.0)]
    cost = Cost.of(runs)
    assert cost == Cost(14.0, 4.0, graphs=3.0, launches=3.0, kernels=0.5, host_us=7000.0)
    assert cost.tokens_per_second == pytest.approx(4000 / 14)
    uncounted = Cost.of([Run(4, 2, 8.0, Counts())])
    assert (uncounted.graphs, uncounted.host_us) == (None, None)


def row(width, stock, patched):
    costs = [Cost(ms, 4.0, 3.0, 3.0, 5.0, 100.0) for ms in (stock, patched)]
    return Row("f16", 1024, width, *costs, stock_token_ms=5.0, patched_token_ms=4.0)


def test_cost_and_gain_stay_apart():
    measured = row(8, 10.0, 6.0)
    assert (measured.cost_stock, measured.cost_patched) == (2.0, 1.5)
    assert measured.gain == pytest.approx(10 / 6)
    shown = measured.rendered()
    assert shown["stock_tokens_per_second"] == 400
    assert shown["patched_tokens_per_second"] == pytest.approx(4000 / 6)


def test_bars_are_those_of_the_issue_for_the_widest_block():
    times = Operators(30.0, 3.0, 600.0, 15.0, patched_selector=18.0, kernel_runs=4)
    rows = [row(1, 5.0, 4.0), row(8, 10.0, 6.0), replace(row(8, 10.0, 60.0), depth=65536)]
    asked = {bar.what: bar for bar in bars(rows, times, "CUDA0: NVIDIA H200", "cuda")}
    assert [round(bar.value, 3) for bar in asked.values()] == [1.5, 1.667, 0.013, 40.0, 4]
    assert all(bar.asked and not bar.missed for bar in asked.values())
    slow = bars([row(8, 10.0, 9.0)], times, "CUDA0: NVIDIA H200", "cuda")
    assert [bar.missed for bar in slow] == [True, True, False, False, False]
    # 1.6 is what an H200 is asked; nothing but the kernels' use can be asked of a CPU.
    assert not bars(rows, times, "CUDA0: NVIDIA A10", "cuda")[0].asked
    assert [bar.asked for bar in bars(rows, times, "AMD EPYC", "cpu")] == [False] * 4 + [True]
    assert not Bar("what", 9.0, 1.0, at_most=True, asked=False).missed


def test_the_script_measures_both_builds_and_writes_what_it_shows(pair, tmp_path, capsys):
    server = build(stock=True).server
    output = tmp_path / "cycle.json"
    options = ["--backend", "cpu", "--stock", server, "--patched", server, "--folder", pair[0].parent, "--no-operators"]
    small = ["--widths", "1,8", "--depths", "48,32", "--cache-types", "q8_0", "--tokens", "24", "--threads", "1"]
    assert cycle27b.main([str(each) for each in [*options, *SIZES, *small, "--json", output, "--check"]]) == 0
    result = json.loads(output.read_text())
    assert [(each["width"], each["depth"]) for each in result["rows"]] == [(1, 48), (1, 32), (8, 48), (8, 32)]
    for each in result["rows"]:
        stock, patched = each["stock"], each["patched"]
        # The same dice fall on both sides, so what is left between them is the time of a cycle.
        assert stock["accepted_length"] == patched["accepted_length"]
        assert each["gain"] == pytest.approx(each["patched_tokens_per_second"] / each["stock_tokens_per_second"])
        assert each["cost_stock"] == pytest.approx(stock["cycle_ms"] / each["stock_token_ms"])
    alone, wide = result["rows"][0], result["rows"][2]
    assert alone["cost_stock"] == alone["stock"]["accepted_length"] == 1
    assert 1 < wide["stock"]["accepted_length"] <= 8
    # A token is one graph; a cycle is those of draft, verify and inject, but for where the first reading falls.
    assert alone["stock"]["graphs"] == pytest.approx(1, abs=0.2)
    assert wide["stock"]["graphs"] == pytest.approx(3, abs=0.8)
    assert 0 < wide["stock"]["host_us"] < 1e3 * wide["stock"]["cycle_ms"]
    assert result["geometry"]["taps"] == list(TINY.taps)
    shown = capsys.readouterr().out
    assert "not asked of this card" in shown
    assert result["machine"]["card"] in shown


CUDA = Path("/usr/local/cuda/lib64")
PROGRAM = """
int cudaStreamSynchronize(void *); int cudaGraphLaunch(void *, void *);
int cudaLaunchKernelExC(const void *, const void *, void **);
int main(void) {
    cudaGraphLaunch(0, 0);
    cudaGraphLaunch(0, 0);
    cudaLaunchKernelExC(0, 0, 0);
    return cudaStreamSynchronize(0) == 0;
}
"""


@pytest.mark.skipif(not (CUDA / "libcudart.so").exists() or shutil.which("cc") is None, reason="no CUDA runtime here")
def test_launches_of_a_program_are_counted_between_it_and_cuda(tmp_path):
    (tmp_path / "launches.c").write_text(PROGRAM)
    linked = [f"-L{CUDA}", f"-Wl,-rpath,{CUDA}", "-lcudart"]
    subprocess.run(["cc", "launches.c", "-o", "launches", *linked], cwd=tmp_path, check=True)
    with counting(tmp_path, "cuda") as counter:
        before = counter.read()
        subprocess.run([tmp_path / "launches"], env={**os.environ, **counter.environment}, check=False)
        counts = counter.between(before, counter.read())
    assert (counts.graphs, counts.cuda_graphs, counts.cuda_kernels) == (0, 2, 1)
    assert counts.wait_ms > 0
