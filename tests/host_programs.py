"""Small C++ programs over the patched sources, compiled and run on the machine at hand."""

import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

import llama_cpp
import pytest

import dflash2.patches

CPP = Path(__file__).parent / "cpp"
PATCHES = Path(dflash2.patches.__file__).parent


def compiler() -> str:
    """The C++ compiler; skips the test if there is none."""
    found = shutil.which(os.environ.get("CXX", "c++"))
    if found is None:
        pytest.skip("needs a C++ compiler")
    return found


def compile_program(output: Path, sources: Iterable[Path], include: Iterable[Path], *flags: str) -> Path:
    """Compile and link with the ggml of llama-cpp-python."""
    libraries = Path(llama_cpp.__file__).parent / "lib"
    command = [compiler(), "-std=c++17", "-O1", "-Wall", "-Wno-format", "-Wno-unused-function", *flags]
    command += [f"-I{folder}" for folder in include]
    for source in sources:
        command += ["-x", "c++", str(source)]
    command += ["-x", "none", "-o", str(output), f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-lggml", "-lggml-base"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return output


def run_program(program: Path, *arguments: object, environment: Mapping[str, str] | None = None) -> tuple[str, str]:
    """(stdout, stderr) of a program that must succeed, in an environment without our variables but those given."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DFLASH2_")}
    command = [str(program), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**kept, **(environment or {})})
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, done.stderr
