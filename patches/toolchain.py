"""The programs that a build of llama.cpp needs, and the flags that make its numbers equal to the Python library's."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from dflash2.errors import BuildError

# gcc drops the tile configuration of ggml's AMX kernels, which then crash (llama.cpp PR 26954).
_NO_AMX = ("-mno-amx-tile", "-mno-amx-int8", "-mno-amx-bf16")


@dataclass(frozen=True)
class Toolchain:
    """Programs by path, `compiler` with its version, and `host`, a hash of everything it knows about this CPU.

    `macros` are the names that the compiler defines for this CPU.
    """

    cmake: str
    ninja: str
    compiler: str
    host: str
    compiler_flags: tuple[str, ...]
    macros: frozenset[str]


def find_toolchain() -> Toolchain:
    """Find cmake, ninja and the C++ compiler (`$CXX`, else `c++`); raises BuildError naming the one that is missing."""
    compiler = os.environ.get("CXX") or "c++"
    macros = _predefined_macros(compiler)
    defined = dict(line.removeprefix("#define ").partition(" ")[::2] for line in macros.splitlines())
    version = defined.get("__VERSION__", "").strip('"')
    broken_amx = "__AMX_INT8__" in defined and "__clang__" not in defined
    return Toolchain(
        cmake=_program("cmake"),
        ninja=_program("ninja"),
        compiler=f"{compiler} {version}",
        host=hashlib.sha256(macros.encode()).hexdigest(),
        compiler_flags=_NO_AMX if broken_amx else (),
        macros=frozenset(defined),
    )


# What compiles the code of a backend: the program, where else than on PATH it may lie, and what to install.
_BACKEND_COMPILERS = {
    "cuda": ("nvcc", "/usr/local/cuda/bin", "NVIDIA's CUDA toolkit"),
    "vulkan": ("glslc", "", "the Vulkan SDK"),
    "hip": ("hipcc", "/opt/rocm/bin", "AMD's ROCm"),
}


def backend_package(backend: str) -> str:
    """What is to be installed to build a backend, "" if nothing is."""
    return _BACKEND_COMPILERS[backend][2] if backend in _BACKEND_COMPILERS else ""


def backend_compiler(backend: str) -> str | None:
    """Path and version of the compiler that a backend needs beside the C++ one; None if it needs none.

    Raises BuildError, naming what to install, if it is missing.
    """
    if backend not in _BACKEND_COMPILERS:
        return None
    name, folder, package = _BACKEND_COMPILERS[backend]
    found = shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", os.defpath), folder]))
    if found is None:
        raise BuildError(f"{name} is needed to build the backend {backend} and was not found; install {package}.")
    result = subprocess.run([found, "--version"], capture_output=True, text=True, check=False)
    return f"{found} {result.stdout.strip()}"


def _program(name: str) -> str:
    """The environment's own program (PyPI's cmake and ninja lie beside its Python), else the one on PATH."""
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    found = shutil.which(name, path=places)
    if found is None:
        raise BuildError(f"{name} is needed to build llama.cpp and was not found; run: pip install {name}")
    return found


def _predefined_macros(compiler: str) -> str:
    """What the compiler defines for this very CPU: its version and every instruction set, one macro a line."""
    command = [*compiler.split(), "-march=native", "-dM", "-E", "-x", "c++", os.devnull]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(
            f"The C++ compiler {compiler!r} cannot be run ({error.strerror}); install one, or name it in CXX."
        ) from error
    if result.returncode:
        said = result.stderr.strip()[-300:] or f"status {result.returncode}"
        raise BuildError(f"The C++ compiler {compiler!r} fails: {said}; name another in CXX.")
    return result.stdout
