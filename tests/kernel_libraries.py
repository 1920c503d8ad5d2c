"""Kernels of patches/src compiled for this machine's CPU, as shared libraries that tests call.

DFLASH2_TEST_SANITIZE=address,undefined (or thread) compiles them with these sanitizers; their runtime has to be
preloaded, as in `LD_PRELOAD=$(gcc -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0 python -m pytest ...`.
"""

import ctypes
import os
import subprocess
from pathlib import Path

import llama_cpp

from dflash2.patches import source

KERNELS = Path(__file__).parent / "kernels"
SOURCES = Path(__file__).parents[1] / "patches" / "src" / "ggml" / "src"
LLAMA_LIBRARIES = Path(llama_cpp.__file__).parent / "lib"


def compile_library(output: Path, sources: list[Path], flags: tuple[str, ...] = ()) -> ctypes.CDLL:
    """Compile `sources` with g++ into the shared library `output` and load it; warnings are errors."""
    ggml = source() / "ggml"
    include = [ggml / "include", ggml / "src", ggml / "src" / "ggml-cpu"]
    command = ["g++", "-std=c++17", "-O2", "-march=native", "-fPIC", "-shared", "-pthread", "-Wall", "-Wextra", "-Werror"]
    command += [f"-isystem{folder}" for folder in include]
    if sanitizers := os.environ.get("DFLASH2_TEST_SANITIZE"):
        command += ["-g", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=undefined"]
    command += ["-o", str(output), *map(str, sources), *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(output))


def cpu_library(folder: Path) -> ctypes.CDLL:
    """The CPU kernels beside the ops of the installed llama.cpp, which they are compared with."""
    link = (f"-L{LLAMA_LIBRARIES}", f"-Wl,-rpath,{LLAMA_LIBRARIES}", "-lggml-cpu", "-lggml-base")
    sources = [KERNELS / "cpu_ops.cpp", *sorted((SOURCES / "ggml-cpu").glob("dflash2-*.cpp"))]
    return compile_library(folder / "libcpu_ops.so", sources, ("-O3", "-Dggml_barrier=test_barrier", *link))


def cuda_library(folder: Path) -> ctypes.CDLL:
    """The CUDA kernel bodies, their lanes run by `lanes.h`."""
    flags = ("-ffp-contract=off", "-Wno-unknown-pragmas", "-Wno-unused-function")
    return compile_library(folder / "libcuda_kernels.so", [KERNELS / "cuda_kernels.cpp"], flags)
