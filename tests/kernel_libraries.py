"""Kernels of patches/src compiled for this machine's CPU, as shared libraries that tests call.

DFLASH2_TEST_SANITIZE=address,undefined (or thread) compiles them with these sanitizers; their runtime has to be
preloaded, as in `LD_PRELOAD=$(gcc -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0 python -m pytest ...`.
"""

import ctypes
import os
import re
import subprocess
from pathlib import Path

import llama_cpp

from dflash2.patches import source

KERNELS = Path(__file__).parent / "kernels"
PATCHES = Path(__file__).parents[1] / "patches"
SOURCES = PATCHES / "src" / "ggml" / "src"
LLAMA_LIBRARIES = Path(llama_cpp.__file__).parent / "lib"


def compile_library(output: Path, sources: list[Path], flags: tuple[str, ...] = ()) -> ctypes.CDLL:
    """Compile `sources` with g++ into the shared library `output` and load it; warnings are errors."""
    ggml = source() / "ggml"
    include = [ggml / "include", ggml / "src", ggml / "src" / "ggml-cpu"]
    command = [
        "g++",
        "-std=c++17",
        "-O2",
        "-march=native",
        "-fPIC",
        "-shared",
        "-pthread",
        "-Wall",
        "-Wextra",
        "-Werror",
    ]
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


def metal_headers(folder: Path) -> Path:
    """llama.cpp's header of kernel arguments with the patch's own, in a folder to include from."""
    name = "ggml/src/ggml-metal/ggml-metal-impl.h"
    header = folder / name
    header.parent.mkdir(parents=True)
    header.write_bytes((source() / name).read_bytes())
    patch = PATCHES / "backend" / "0050-metal-kernels.patch"
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    subprocess.run(["git", "apply", f"--include={name}", str(patch)], cwd=folder, env=environment, check=True)
    return header.parent


def metal_library(folder: Path) -> ctypes.CDLL:
    """The Metal kernels, their threads run by `lanes.h`; `threadgroup` arrays become the lanes' shared memory."""
    text = (SOURCES / "ggml-metal" / "kernels" / "dflash2.metal").read_text()
    shared, n_arrays = re.subn(r"^( +)threadgroup (\w+ +\w+\[.*\];)$", r"\1LANES_SHARED \2", text, flags=re.MULTILINE)
    assert n_arrays == 8
    kernels = folder / "dflash2.metal.h"
    kernels.write_text(shared)
    flags = (
        f"-I{KERNELS / 'metal'}",
        f"-isystem{metal_headers(folder)}",
        f'-DDFLASH2_METAL_SOURCE="{kernels}"',
        "-Wno-attributes",
    )
    return compile_library(folder / "libmetal_kernels.so", [KERNELS / "metal_kernels.cpp"], flags)
