"""A patched library runs the kernels where their patterns stand, and the ops where they are switched off.

Every run of it is a process.
"""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash2.patches import source

TIMER = Path(__file__).parents[1] / "benchmarks" / "patches_ops.cpp"
N_CONV = 20
N_RUNS = 3  # two to warm up and one
N_TOP_K = 2 * N_RUNS  # by itself, and in the selector


@pytest.fixture(scope="module")
def kernel_runs(patched, tmp_path_factory) -> Callable[..., dict[str, float]]:
    """Runs the graphs of one draft pass through the scheduler, with environment variables, and reads the counters."""
    program = tmp_path_factory.mktemp("timer") / "patches_ops"
    command = ["g++", "-std=c++17", "-O2", f"-I{source() / 'ggml' / 'include'}", str(TIMER), "-o", str(program)]
    command += [f"-L{patched.libraries}", "-lggml", "-lggml-cpu", "-lggml-base", "-ldl"]
    subprocess.run(command, check=True)

    def run(graph: str, threads: int, **environment: str) -> dict[str, float]:
        env = {**os.environ, "LD_LIBRARY_PATH": str(patched.libraries), **environment}
        done = subprocess.run([program, graph, str(threads), "1"], env=env, capture_output=True, text=True, check=True)
        return json.loads(done.stdout)

    return run


@pytest.mark.parametrize("threads", [1, 2])
def test_every_convolution_and_top_k_of_a_draft_pass_is_fused(kernel_runs, threads):
    runs = kernel_runs("lean", threads)
    assert (runs["conv_runs"], runs["top_k_runs"]) == (N_CONV * N_RUNS, N_TOP_K)


def test_a_kernel_that_is_switched_off_does_not_run(kernel_runs):
    runs = kernel_runs("lean", 1, DFLASH2_NO_CONV="1")
    assert (runs["conv_runs"], runs["top_k_runs"]) == (0, N_TOP_K)
    runs = kernel_runs("lean", 1, DFLASH2_NO_TOPK="1")
    assert (runs["conv_runs"], runs["top_k_runs"]) == (N_CONV * N_RUNS, 0)


def test_the_stock_chain_is_no_pattern(kernel_runs):
    assert kernel_runs("stock", 1)["conv_runs"] == 0
