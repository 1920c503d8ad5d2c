"""`dflash2 build`, `dflash2 patch` and `dflash2 doctor`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dflash2.builds import library_builds
from dflash2.commands.terminal import FILE, console, errors
from dflash2.constants import LLAMA_CPP_COMMIT, LLAMA_CPP_PYTHON_VERSION, PATCHED_ABI_VERSION, SECOND_BASE

if TYPE_CHECKING:
    from dflash2.builds import Build
    from dflash2.patches import Status

_TARGETS = ("libs", "server", "quantize", "rpc", "tests")
# Backends with a kernel table, and whose it is: HIP compiles the sources of CUDA.
_TABLES: dict[str, Literal["cuda", "metal"]] = {"cuda": "cuda", "hip": "cuda", "metal": "metal"}


def _targets(_ctx: click.Context, _param: click.Parameter, value: str) -> tuple[str, ...]:
    """Names separated by commas; a usage error for one that there is not."""
    names = tuple(name.strip() for name in value.split(","))
    if not set(names) <= set(_TARGETS):
        raise click.BadParameter(f"{value!r} is not a list of {', '.join(_TARGETS)}.")
    return names


@click.command()
@click.option(
    "--backend",
    type=click.Choice(["cpu", "cuda", "metal", "vulkan", "hip"]),
    default="cpu",
    show_default=True,
    help="What it runs on, beside the CPU.",
)
@click.option(
    "--targets",
    callback=_targets,
    default="libs,server",
    show_default=True,
    help=f"Of {', '.join(_TARGETS)}, separated by commas.",
)
@click.option(
    "--jobs", type=click.IntRange(min=1, max=1024), default=None, help="Compilers at once. Default: one a CPU."
)
@click.option(
    "--source", type=FILE, default=None, help="A llama.cpp tree of a known base, instead of the pinned sdist."
)
@click.option("--base", type=click.Choice([LLAMA_CPP_COMMIT, SECOND_BASE]), default=LLAMA_CPP_COMMIT, show_default=True)
@click.option("--stock", is_flag=True, help="Without the patches: what to compare with.")
@click.option("--backend-module", is_flag=True, help="Only the backend, for GGML_BACKEND_PATH of a stock program.")
@click.option("--measure-dispatch", is_flag=True, help="Then time the kernels of few rows on this card: a few seconds.")
def build(
    backend: str,
    targets: tuple[str, ...],
    jobs: int | None,
    source: Path | None,
    base: str,
    stock: bool,
    backend_module: bool,
    measure_dispatch: bool,
) -> None:
    """Build llama.cpp with the patches into the cache; the Python runtime then uses its library."""
    from dflash2 import patches

    if measure_dispatch:
        if stock or backend_module or backend not in _TABLES:
            raise click.UsageError("--measure-dispatch needs the patches and a --backend cuda, hip or metal.")
        targets = (*targets, "measure")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task("building llama.cpp", total=None)
        made = patches.build(
            stock=stock,
            backend=backend,
            targets=targets,
            module=backend_module,
            source=source,
            base=base,
            jobs=jobs,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    what = "stock" if stock else "patched"
    console.print(f"{what} llama.cpp {made.base}, {made.backend}: {made.libraries}", markup=False, soft_wrap=True)
    if backend_module:
        return
    if "server" in targets:
        console.print(f"llama-server: {made.server}", markup=False, soft_wrap=True)
    if "libs" in targets and not stock:
        used = any(found.key == made.key for found in library_builds())
        verdict = "will use it" if used else f"will not use it: it is for another base than {LLAMA_CPP_COMMIT}"
        console.print(f"The Python runtime {verdict}; `dflash2 doctor` says which library it takes.", soft_wrap=True)
    if measure_dispatch:
        measure_table(made)


def measure_table(made: Build) -> None:
    """Measure the kernel table of the card at hand with the programs of `made`, and say where it is."""
    from dflash2.patches import dispatch

    with Progress(TextColumn("{task.description}"), console=errors, transient=True) as bar:
        task = bar.add_task("timing kernels", total=None)
        measured = dispatch.measure(
            made.libraries,
            _TABLES[made.backend],
            progress=lambda name, rows: bar.update(task, description=f"timing kernels: {name}, {rows} rows"),
        )
    limits = ", ".join(f"{entry.type} {entry.rows}" for entry in measured.entries)
    console.print(f"{measured.name}: rows for the kernel of few: {limits}", markup=False, soft_wrap=True)
    table = made.libraries / dispatch.TABLE
    console.print(f"In effect in everything that loads this build: {table}", markup=False, soft_wrap=True)


@click.command()
@click.argument("folder", type=FILE)
@click.option("--remove", is_flag=True, help="Take the patches away again.")
@click.option("--status", is_flag=True, help="Only say how the tree stands.")
def patch(folder: Path, remove: bool, status: bool) -> None:
    """Patch the llama.cpp source tree FOLDER, all of the patches or none; it must be of a known base."""
    from dflash2 import patches

    if remove and status:
        raise click.UsageError("--remove and --status exclude each other.")
    if remove:
        patches.remove(folder)
        console.print(f"llama.cpp {patches.describe(folder)}: not patched", markup=False, soft_wrap=True)
        return
    if not status:
        patches.apply(folder)
    now = patches.status(folder)
    console.print(f"llama.cpp {now.base}: {_standing(now)}", markup=False, soft_wrap=True)
    for name in now.changed:
        console.print(f"  changed since: {name}", markup=False, soft_wrap=True)


def _standing(now: Status) -> str:
    if now.left:
        return "not patched any more, the files were checked out anew; --remove takes away what is left of the patches"
    if not now.patched:
        return "not patched"
    if not now.complete:
        return "partly patched: a call was interrupted, or files were checked out anew; run it again"
    return "patched" if now.current else "patched by another version of dflash2; `dflash2 patch` brings it up to date"


@click.command()
def doctor() -> None:
    """Say which llama.cpp library the Python runtime uses and why, what it can do, and what there is to choose from."""
    for label, value in _findings():
        console.print(f"{label:<18}  {value}", markup=False, soft_wrap=True)
    for found in library_builds():
        console.print(f"patched build {found.key}: {_summary(found)}", markup=False, soft_wrap=True)


def _findings() -> Iterator[tuple[str, str]]:
    from dflash2 import native

    found = native.support()
    yield "llama-cpp-python", f"{found.version} (supported: {LLAMA_CPP_PYTHON_VERSION} = llama.cpp {LLAMA_CPP_COMMIT})"
    kind = f"patched, C interface {PATCHED_ABI_VERSION}" if found.library.patched else "stock"
    yield "library", f"{kind}: {found.library.path}"
    yield "because", found.library.reason
    yield "functions missing", ", ".join(found.missing) or "none"
    yield "drafters", ("none", "DFlash", "DFlash 2")[found.drafters]
    yield "selector rows", f"layout {native.lattice_layout()}"
    safe = native.repacking_is_safe()
    yield "CPU weight layouts", "repacked" if safe else "as in the file: this library's AMX kernels may crash"
    yield "GPU devices", ", ".join(native.gpu_names()) or "none"
    for name, count in native.counters().items():
        yield f"counter {name}", str(count)


def _summary(found: Build) -> str:
    from dflash2.patches import read_series

    age = "" if found.series == read_series().digest else " (of another version of dflash2; run `dflash2 build` again)"
    return f"{found.backend}, {', '.join(found.targets)}, patches {found.series[:8]}{age}, {found.libraries}"
