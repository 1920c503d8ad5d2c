"""Compile llama.cpp's pinned source into the cache, once per source, flags, compiler and CPU."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from filelock import FileLock

from dflash2.cache import cache_folder
from dflash2.constants import LLAMA_CPP_COMMIT, SDIST_SHA256
from dflash2.errors import BuildError
from dflash2.patches.source import source
from dflash2.patches.toolchain import Toolchain, find_toolchain

# ggml's own options stay at their defaults, as in llama-cpp-python's build: the numbers of both are then equal.
_OPTIONS = {
    "BUILD_SHARED_LIBS": "ON",
    "CMAKE_BUILD_TYPE": "Release",
    "CMAKE_BUILD_RPATH_USE_ORIGIN": "ON",
    "LLAMA_BUILD_APP": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_OPENSSL": "OFF",
    # Neither built nor downloaded: a build needs no network.
    "LLAMA_BUILD_UI": "OFF",
    "LLAMA_USE_PREBUILT_UI": "OFF",
}
_TARGET = "llama-server"
_KEY_LENGTH = 16
_SHOWN_LINES = 20
_NINJA_STATUS = "[%f/%t] "
_STEP = re.compile(r"\[(\d+)/(\d+)\] ")

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Build:
    """A finished build: its folder, its `llama-server`, the key it is cached by, and the llama.cpp commit it is of."""

    folder: Path
    server: Path
    key: str
    base: str


def build(*, stock: bool, jobs: int | None = None, progress: Progress | None = None) -> Build:
    """Build `llama-server` for this machine's CPU, or return the build that is already there.

    `stock=True` compiles the pinned source as it is. This version has no patches, so `stock=False` raises BuildError.
    `jobs` is the number of compilers at once (default: one per CPU); `progress(done, total)` counts compiled files.
    An interrupted build goes on where it stopped; a second process that wants the same build waits for the first.
    Raises BuildError with the last lines of the log, whose full text stays in the build's folder.
    """
    toolchain = find_toolchain()
    identity = _identity(stock, toolchain)
    folder = _folder(identity)
    with FileLock(folder.with_suffix(".lock")):
        if (finished := _finished(folder)) is not None:
            return finished
        tree = source()
        folder.mkdir(exist_ok=True)
        with (folder / "build.log").open("w", buffering=1) as log:
            _run(_configure_command(toolchain, tree, folder), log)
            _run(_compile_command(toolchain, folder, jobs), log, progress)
        _write_manifest(folder, identity)
        return _build(folder)


def locate(*, stock: bool) -> Build | None:
    """The finished build that `build` would return at once, or None; raises BuildError as `build` does."""
    return _finished(_folder(_identity(stock, find_toolchain())))


def _identity(stock: bool, toolchain: Toolchain) -> dict[str, object]:
    """Everything that decides what comes out of the compiler: the key is its hash, the manifest its text."""
    if not stock:
        raise BuildError("This version of llama-dflash2 has no llama.cpp patches to build; ask for the stock build.")
    return {
        "base": LLAMA_CPP_COMMIT,
        "source_sha256": SDIST_SHA256,
        "options": _OPTIONS,
        "compiler_flags": toolchain.compiler_flags,
        "environment_flags": [os.environ.get(name, "") for name in ("CFLAGS", "CXXFLAGS", "LDFLAGS")],
        "compiler": toolchain.compiler,
        "host": toolchain.host,
        "target": _TARGET,
    }


def _folder(identity: dict[str, object]) -> Path:
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return cache_folder("builds") / digest[:_KEY_LENGTH]


def _finished(folder: Path) -> Build | None:
    """The build in `folder` if it is complete: its manifest is written last."""
    found = _build(folder)
    return found if (folder / "manifest.json").is_file() and found.server.is_file() else None


def _build(folder: Path) -> Build:
    suffix = ".exe" if os.name == "nt" else ""
    return Build(folder, folder / "tree" / "bin" / f"{_TARGET}{suffix}", folder.name, LLAMA_CPP_COMMIT)


def _write_manifest(folder: Path, identity: dict[str, object]) -> None:
    partial = folder / "manifest.json.partial"
    partial.write_text(json.dumps(identity, indent=2, sort_keys=True) + "\n")
    partial.replace(folder / "manifest.json")


def _configure_command(toolchain: Toolchain, tree: Path, folder: Path) -> list[str]:
    options = dict(_OPTIONS, CMAKE_MAKE_PROGRAM=toolchain.ninja)
    for language in ("C", "CXX"):
        flags = [os.environ.get(f"{language}FLAGS", ""), *toolchain.compiler_flags]
        options[f"CMAKE_{language}_FLAGS"] = " ".join(flags).strip()
    definitions = [f"-D{name}={value}" for name, value in options.items()]
    return [toolchain.cmake, "-S", str(tree), "-B", str(folder / "tree"), "-G", "Ninja", *definitions]


def _compile_command(toolchain: Toolchain, folder: Path, jobs: int | None) -> list[str]:
    n_jobs = jobs or os.cpu_count() or 1
    return [toolchain.ninja, "-C", str(folder / "tree"), "-j", str(n_jobs), _TARGET]


def _run(command: Sequence[str], log: TextIO, progress: Progress | None = None) -> None:
    """Run `command` with its output in `log`; raises BuildError with the last lines if it fails."""
    environment = {**os.environ, "NINJA_STATUS": _NINJA_STATUS}
    last: deque[str] = deque(maxlen=_SHOWN_LINES)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=environment
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                log.write(line)
                last.append(line)
                if progress is not None and (step := _STEP.match(line)):
                    progress(int(step[1]), int(step[2]))
        except BaseException:
            process.terminate()
            raise
    if process.returncode:
        raise BuildError(f"Building llama.cpp failed; the full log is {log.name}. Its last lines:\n{''.join(last)}")
