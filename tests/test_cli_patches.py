"""`dflash2 build`, `patch` and `doctor` as a user runs them."""

import os
import shutil
from pathlib import Path

import pytest
from test_cli import run
from test_series import copy_of_tree

from dflash2 import native
from dflash2.constants import LLAMA_CPP_COMMIT
from dflash2.patches import build, read_series, source


@pytest.fixture
def tree(tmp_path):
    return copy_of_tree(LLAMA_CPP_COMMIT, tmp_path / "llama.cpp")


def test_patch_applies_says_so_and_removes(tree):
    touched = tree / read_series().touched[0]
    before = touched.read_bytes()
    for arguments, said in (
        (["--status"], "llama.cpp 0c1e57098: not patched\n"),
        ([], "llama.cpp 0c1e57098: patched\n"),
        (["--status"], "llama.cpp 0c1e57098: patched\n"),
        (["--remove"], "llama.cpp 0c1e57098: not patched\n"),
    ):
        result = run("dflash2", "patch", tree, *arguments)
        assert (result.returncode, result.stdout) == (0, said), result.stderr
    assert touched.read_bytes() == before


def test_patch_refuses_a_foreign_tree_in_one_sentence(tree):
    touched = tree / read_series().touched[0]
    touched.write_text("")
    result = run("dflash2", "patch", tree)
    assert result.returncode == 1
    assert f"error: {tree} holds llama.cpp (ggml 0.25.3), which is no base of the patches" in result.stderr
    assert "Traceback" not in result.stderr


def test_build_says_where_what_it_made_is():
    made = build(stock=True, targets=("server",))
    result = run("dflash2", "build", "--stock", "--targets", "server")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        f"stock llama.cpp {made.base}, cpu: {made.libraries}",
        f"llama-server: {made.server}",
    ]


@pytest.mark.parametrize(
    "arguments",
    [["--targets", "all"], ["--targets", ""], ["--targets", "libs,,server"], ["--backend", "tpu"], ["--base", "b1"]],
)
def test_build_names_what_it_does_not_know(arguments):
    result = run("dflash2", "build", *arguments)
    assert result.returncode == 2
    assert arguments[0] in result.stderr


def refused(*arguments, **environment) -> str:
    """The one sentence that `dflash2` ends with in this environment."""
    result = run("dflash2", *arguments, env={**os.environ, **environment})
    assert result.returncode == 1, result.stdout
    assert len(result.stderr.splitlines()) == 1, result.stderr
    return result.stderr


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("CMAKE_ARGS", '-DFOO="x', "CMAKE_ARGS is '-DFOO=\"x', which cannot be read (No closing quotation)"),
        ("CMAKE_ARGS", "garbage", "CMAKE_ARGS has 'garbage', which is no option of CMake"),
        ("CMAKE_ARGS", "-DFOO=1 garbage", "CMAKE_ARGS has 'garbage', which is no option of CMake"),
        ("CXX", "/bin/false", "The C++ compiler '/bin/false' fails: status 1; name another in CXX."),
    ],
)
def test_build_names_the_variable_that_is_wrong(variable, value, said):
    assert said in refused("build", **{variable: value})


NVCC = shutil.which("nvcc")


@pytest.mark.skipif(
    NVCC is None or any(Path("/usr/local/cuda").rglob("libcublas.so*")), reason="needs a toolkit that is not whole"
)
def test_build_names_the_toolkit_of_which_a_part_is_missing(tmp_path):
    (tmp_path / "sources").symlink_to(source().parent)
    said = refused("build", "--backend", "cuda", "--stock", DFLASH2_CACHE=str(tmp_path))
    assert "CUDA::cublas is needed to build the backend cuda and was not found; install all of NVIDIA's CUDA" in said


def test_a_full_disk_is_named_with_the_folder(tmp_path):
    """As a limit on the size of files has it: 100 kB."""
    resource = pytest.importorskip("resource")
    result = run(
        *("dflash2", "build", "--source", source()),
        env={**os.environ, "DFLASH2_CACHE": str(tmp_path)},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)),
    )
    assert result.returncode == 1
    assert result.stderr.startswith(f"error: {tmp_path}/builds/")
    assert "cannot be written: [Errno 27] File too large" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_doctor_names_the_variable_that_names_no_library(tmp_path):
    said = refused("doctor", LLAMA_CPP_LIB_PATH=str(tmp_path))
    assert f"LLAMA_CPP_LIB_PATH is '{tmp_path}', a folder without libllama; unset it, or name another." in said


@pytest.mark.parametrize("arguments", [[], ["--backend", "cuda", "--stock"], ["--backend", "cuda", "--backend-module"]])
def test_a_kernel_table_is_measured_for_patched_gpu_builds_only(arguments):
    result = run("dflash2", "build", "--measure-dispatch", *arguments)
    assert result.returncode == 2
    assert "--measure-dispatch needs the patches and a --backend cuda, hip or metal." in " ".join(result.stderr.split())


def test_doctor_says_which_library_is_used_and_why():
    result = run("dflash2", "doctor")
    assert result.returncode == 0, result.stderr
    rows = {line[:18].strip(): line[20:] for line in result.stdout.splitlines() if not line.startswith("patched build")}
    assert rows["library"] == f"stock: {native.library().path}"
    assert rows["because"] == "DFLASH2_LIBRARY is stock"
    assert rows["functions missing"] == "none"
    assert rows["drafters"] == "DFlash 2"
    assert rows["selector rows"] == "layout 1"
    assert rows["GPU devices"] == (", ".join(native.gpu_names()) or "none")


def test_doctor_of_the_patched_library(patched):
    result = run("dflash2", "doctor", env={**os.environ, "DFLASH2_LIBRARY": ""})
    assert result.returncode == 0, result.stderr
    assert "patched, C interface 1: " in result.stdout
    current = f"patched build {patched.key}: cpu, {', '.join(patched.targets)}, patches {patched.series[:8]}, "
    assert current in result.stdout
