"""Compile llama.cpp into the cache, patched or not, once per source, patches, options, compiler and CPU."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from filelock import FileLock

from dflash2.builds import Build, cpu_identity, library_builds, library_file, read_build, write_manifest
from dflash2.cache import cache_folder
from dflash2.constants import PATCHED_ABI_VERSION
from dflash2.errors import BuildError
from dflash2.patches.bases import PINNED
from dflash2.patches.disk import writing
from dflash2.patches.options import COMMON, MODULE, TARGETS, Extra, check_request, extra_options
from dflash2.patches.series import Series, read_series
from dflash2.patches.toolchain import Toolchain, backend_package, find_toolchain
from dflash2.patches.trees import Origin, make_tree, origin

if sys.platform != "win32":
    import fcntl

_KEY_LENGTH = 16
_SHOWN_LINES = 20
_NINJA_STATUS = "[%f/%t] "
_STEP = re.compile(r"\[(\d+)/(\d+)\] ")
# CMake's words for a compiler that is there without a library that belongs to it.
_MISSING_PART = re.compile(r"(\w+::\w+)\s+but the target was not found")

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class _Request:
    """What is to be built: `identity` is all that decides what comes out of the compiler, the key its hash."""

    origin: Origin
    stock: bool
    backend: str
    module: bool
    series: str
    extra: Extra
    identity: dict[str, object]
    toolchain: Toolchain

    @property
    def folder(self) -> Path:
        digest = hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()
        return cache_folder("builds") / digest[:_KEY_LENGTH]


def build(
    *,
    stock: bool = False,
    backend: str = "cpu",
    targets: Sequence[str] = ("libs", "server"),
    module: bool = False,
    source: Path | None = None,
    base: str = PINNED.name,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Build:
    """Build llama.cpp for this machine, or return the build that is already there.

    Args:
        stock: without the patches.
        backend: cpu, cuda, metal, vulkan or hip; the CPU's is always there.
        targets: of libs (libllama and libggml), server, quantize, rpc (server and client), tests, and measure (the
            program that `dispatch.measure` runs; not without the patches).
        module: instead of the targets, only the backend as a library that a program of the same base, built with
            GGML_BACKEND_DL or not, loads by GGML_BACKEND_PATH. It holds the backend patches.
        source: a source tree of one of the bases, taken as it is and left so; None for the pinned sdist of `base`.
        base: name of the base (see `bases.py`) where `source` is None.
        jobs: compilers at once; None for one per CPU.
        progress: is told (done, total) of the compiled files.

    An interrupted build goes on where it stopped; a second process that wants the same build waits for the first.
    Options in the environment's CMAKE_ARGS are passed on. Raises PatchError if the patches do not fit the source, and
    BuildError with the last lines of the log, whose full text stays in the build's folder.
    """
    check_request(backend, targets, stock)
    request = _request(stock, backend, module, origin(source, base))
    wanted = (MODULE,) if module else tuple(dict.fromkeys(targets))
    folder = request.folder
    with FileLock(folder.with_suffix(".lock")), writing(folder):
        found = read_build(folder)
        if found is not None and _finished(found, wanted):
            return found
        done = () if found is None else found.targets
        missing = [target for target in wanted if found is None or not _finished(found, (target,))]
        folder.mkdir(exist_ok=True)
        tree = make_tree(request.origin, folder / "llama.cpp", None if stock else _patches(module))
        with _children_hold(folder) as held, (folder / "build.log").open("w", buffering=1) as log:
            _configure(request, tree, {*done, *wanted}, log, held)
            _run(_compile_command(request, missing, jobs), folder, log, held, progress)
        _finish(request, tuple(dict.fromkeys((*done, *wanted))))
        made = read_build(folder)
        if made is None or not _finished(made, wanted):
            raise BuildError(f"Building llama.cpp left something out; the full log is {folder / 'build.log'}.")
        return made


def locate(*, stock: bool = False, backend: str | None = None, targets: Sequence[str] = ()) -> Build | None:
    """The build that is used, or None if there is none.

    Without `stock`, the patched build whose library the runtime takes, of `backend` if that is given, among those that
    have `targets`. With it, what `build(stock=True)` would return at once: its server, or these targets. Raises
    BuildError as `build` does.
    """
    if not stock:
        fitting = (found for found in library_builds() if set(targets) <= set(found.targets))
        return next((found for found in fitting if backend in (None, found.backend)), None)
    found = read_build(_request(True, backend or "cpu", False, origin(None, PINNED.name)).folder)
    return found if found is not None and _finished(found, targets or ("server",)) else None


def _patches(module: bool) -> Series:
    series = read_series()
    return series.only("backend") if module else series


def _request(stock: bool, backend: str, module: bool, made_from: Origin) -> _Request:
    toolchain = find_toolchain()
    extra = extra_options(backend, module, toolchain)
    series = "" if stock else _patches(module).digest
    identity: dict[str, object] = {
        "base": made_from.base.name,
        "source_sha256": made_from.sha256,
        "options": COMMON,
        "compiler_flags": toolchain.compiler_flags,
        "environment_flags": [os.environ.get(name, "") for name in ("CFLAGS", "CXXFLAGS", "LDFLAGS")],
        "compiler": toolchain.compiler,
        "host": toolchain.host,
        **extra.identity(),
    }
    if stock:
        identity["target"] = "llama-server"  # of the time when there was nothing else: the keys stay what they were
    else:
        identity["series"] = series
    return _Request(made_from, stock, backend, module, series, extra, identity, toolchain)


def _finished(found: Build, wanted: Sequence[str]) -> bool:
    """Whether the manifest, which is written last, lists all that is wanted, and it still lies there."""
    if not set(wanted) <= set(found.targets):
        return False
    if MODULE in wanted:
        return _module_file(found).is_file()
    programs = (found.program(name) for target in wanted for name in TARGETS[target].programs)
    library = "libs" not in wanted or library_file(found.libraries) is not None
    return library and all(program.is_file() for program in programs)


def _module_file(found: Build) -> Path:
    """The loadable backend of a module build."""
    prefix, suffix = ("", ".dll") if sys.platform == "win32" else ("lib", ".so")
    return found.libraries / f"{prefix}ggml-{found.backend}{suffix}"


def _finish(request: _Request, targets: Sequence[str]) -> None:
    facts = {
        "stock": request.stock,
        "backend": request.backend,
        "module": request.module,
        "series": request.series,
        "targets": list(targets),
        "abi": 0 if request.stock or request.module else PATCHED_ABI_VERSION,
        "cpu": cpu_identity(),
        "finished": time.time(),
    }
    write_manifest(request.folder, {**request.identity, **facts})


def _configure_command(request: _Request, tree: Path, targets: set[str]) -> list[str]:
    toolchain = request.toolchain
    options = dict(COMMON, CMAKE_MAKE_PROGRAM=toolchain.ninja)
    for language in ("C", "CXX"):
        flags = [os.environ.get(f"{language}FLAGS", ""), *toolchain.compiler_flags]
        options[f"CMAKE_{language}_FLAGS"] = " ".join(flags).strip()
    options.update(request.extra.options)
    for target in sorted(targets - {MODULE}):
        options.update(TARGETS[target].options)
    if not request.stock:
        # Not git, which might find another repository around the cache, says what this is; ggml takes it over.
        commit = f"{request.origin.base.commit}+dflash2.{request.series[:8]}"
        options.update(GIT_EXE="OFF", LLAMA_BUILD_COMMIT=commit)
    definitions = [f"-D{name}={value}" for name, value in options.items()]
    folders = ["-S", str(tree), "-B", str(request.folder / "tree")]
    return [toolchain.cmake, *folders, "-G", "Ninja", *definitions, *request.extra.arguments]


def _compile_command(request: _Request, targets: Sequence[str], jobs: int | None) -> list[str]:
    n_jobs = jobs or os.cpu_count() or 1
    names = [f"ggml-{request.backend}"] if request.module else [n for t in targets for n in TARGETS[t].cmake]
    return [request.toolchain.ninja, "-C", str(request.folder / "tree"), "-j", str(n_jobs), *dict.fromkeys(names)]


@contextmanager
def _children_hold(folder: Path) -> Iterator[tuple[int, ...]]:
    """Wait for the compilers of a killed build; gives descriptors through which our own hold the folder, as they do.

    On Windows nothing is held.
    """
    if sys.platform == "win32":
        yield ()
        return
    with (folder / "compilers.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield (file.fileno(),)
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # for all who have it: a compiler cache's server stays


def _configure(request: _Request, tree: Path, targets: set[str], log: TextIO, held: tuple[int, ...]) -> None:
    try:
        _run(_configure_command(request, tree, targets), request.folder, log, held)
    except BuildError as error:
        package, part = backend_package(request.backend), _MISSING_PART.search(str(error))
        if package and part:
            raise BuildError(
                f"{part[1]} is needed to build the backend {request.backend} and was not found; install all of "
                f"{package}."
            ) from error
        raise


def _run(
    command: Sequence[str], folder: Path, log: TextIO, held: tuple[int, ...], progress: Progress | None = None
) -> None:
    """Run `command` with its output in `log`; raises BuildError with the last lines if it fails."""
    # ccache, which llama.cpp's build uses if it is there, then sees the same paths in every build folder.
    environment = {"CCACHE_BASEDIR": str(folder), "CCACHE_NOHASHDIR": "1", **os.environ, "NINJA_STATUS": _NINJA_STATUS}
    last: deque[str] = deque(maxlen=_SHOWN_LINES)
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
        pass_fds=held,
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
