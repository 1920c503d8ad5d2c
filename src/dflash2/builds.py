"""Finished builds of llama.cpp in the cache, by the manifests that `dflash2 build` writes into their folders."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from dflash2.cache import cache_path
from dflash2.constants import LLAMA_CPP_COMMIT, PATCHED_ABI_VERSION

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Build:
    """A build with a manifest.

    Attributes:
        folder: where it lies; `tree/bin` below it holds programs and libraries.
        key: what the cache knows it by.
        base: the llama.cpp it was made from, a commit or tag.
        stock: whether it is without patches.
        backend: cpu, cuda, metal, vulkan or hip.
        module: whether it is nothing but a loadable backend.
        series: SHA-256 of the patches, empty for stock.
        targets: what is finished: libs, server, quantize, rpc, tests, measure, module.
        abi: version of the C interface of its library, 0 for stock.
        cpu: what `cpu_identity` says where it was built; code for one CPU may crash on another.
        finished: when, in seconds since 1970.
    """

    folder: Path
    key: str
    base: str
    stock: bool
    backend: str
    module: bool
    series: str
    targets: tuple[str, ...]
    abi: int
    cpu: str
    finished: float

    @property
    def libraries(self) -> Path:
        """Folder of the shared libraries."""
        return self.folder / "tree" / "bin"

    @property
    def server(self) -> Path:
        """The program `llama-server`."""
        return self.program("llama-server")

    def program(self, name: str) -> Path:
        """The program `name` of this build."""
        return self.folder / "tree" / "bin" / (f"{name}.exe" if os.name == "nt" else name)


def read_build(folder: Path) -> Build | None:
    """The build in `folder`, None if it has no manifest that can be read."""
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
        return Build(
            folder=folder,
            key=folder.name,
            base=str(manifest["base"]),
            stock=bool(manifest.get("stock", True)),
            backend=str(manifest.get("backend", "cpu")),
            module=bool(manifest.get("module", False)),
            series=str(manifest.get("series", "")),
            targets=tuple(map(str, manifest.get("targets", ["server"]))),
            abi=int(manifest.get("abi", 0)),
            cpu=str(manifest.get("cpu", "")),
            finished=float(manifest.get("finished", 0)),
        )
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def write_manifest(folder: Path, manifest: Mapping[str, object]) -> None:
    """Write the manifest of the build in `folder` as a whole."""
    partial = folder / f"{MANIFEST}.partial"
    partial.write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n")
    partial.replace(folder / MANIFEST)


def library_builds() -> list[Build]:
    """Patched builds whose library llama-cpp-python can load here, the best first (see `_rank`)."""
    return _best(_is_for_python)


def server_builds(targets: Collection[str] = ()) -> list[Build]:
    """Patched builds whose `llama-server` runs here and that have `targets` besides, the best first (see `_rank`)."""
    return _best(lambda build: _serves(build) and set(targets) <= set(build.targets))


def _best(wanted: Callable[[Build], bool]) -> list[Build]:
    folders = cache_path("builds").glob("*/")
    found = [build for build in map(read_build, folders) if build is not None and wanted(build)]
    return sorted(found, key=_rank, reverse=True)


def _rank(build: Build) -> tuple[bool, bool, float]:
    """Those for a GPU are better than those for the CPU alone, then those of the pinned base, then the newest."""
    return build.backend != "cpu", build.base == LLAMA_CPP_COMMIT, build.finished


def _serves(build: Build) -> bool:
    patched = not build.stock and not build.module and "server" in build.targets
    same = build.abi == PATCHED_ABI_VERSION and build.cpu == cpu_identity()
    return patched and same and build.server.is_file()


def _is_for_python(build: Build) -> bool:
    wanted = not build.stock and not build.module and "libs" in build.targets
    same = build.base == LLAMA_CPP_COMMIT and build.abi == PATCHED_ABI_VERSION and build.cpu == cpu_identity()
    return wanted and same and library_file(build.libraries) is not None


def library_file(folder: Path) -> Path | None:
    """File of libllama in `folder`, by the names that llama_cpp looks for; None if there is none."""
    names = {"darwin": ("libllama.so", "libllama.dylib"), "win32": ("llama.dll", "libllama.dll")}
    for name in names.get(sys.platform, ("libllama.so",)):
        if (folder / name).exists():
            return folder / name
    return None


@cache
def cpu_identity() -> str:
    """What tells this CPU's instruction sets from another's."""
    try:
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    fields = (line.partition(":") for line in lines)
    return " ".join(value.strip() for name, _, value in fields if name.strip() in ("model name", "flags", "Features"))
