"""The bases: versions of llama.cpp that the series is for, and how a tree is recognised as one of them.

A tree is of a base if every file the series touches, and every header our sources are compiled against, has the very
content it has there: what `bases.json` says. After a change of the series, `python -m dflash2.patches.record` writes it
anew.
"""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from dflash2 import constants
from dflash2.errors import PatchError
from dflash2.hashing import sha256_file
from dflash2.patches.series import Series

# What our own sources are compiled against, touched or not.
_INTERFACES = (
    "ggml/include/ggml-backend.h",
    "ggml/include/ggml.h",
    "ggml/src/ggml-backend-impl.h",
    "ggml/src/ggml-impl.h",
    "include/llama.h",
    "src/llama-context.h",
    "src/llama-ext.h",
    "src/llama-graph.h",
    "src/llama-model.h",
)


@dataclass(frozen=True)
class Base:
    """A version of llama.cpp: its `name` (commit or tag) and the sdist on the package index that holds its source.

    `commit` is "unknown", as llama.cpp itself has it, where only the tag is known.
    """

    name: str
    commit: str
    ggml_version: str
    package: str
    version: str
    sdist: str
    sha256: str
    folder: str


PINNED = Base(
    name=constants.LLAMA_CPP_COMMIT,
    commit=constants.LLAMA_CPP_COMMIT,
    ggml_version=constants.GGML_VERSION,
    package="llama-cpp-python",
    version=constants.LLAMA_CPP_PYTHON_VERSION,
    sdist=constants.SDIST_NAME,
    sha256=constants.SDIST_SHA256,
    folder=constants.SDIST_SOURCE_FOLDER,
)
BASES = {
    base.name: base
    for base in (
        PINNED,
        Base(
            name=constants.SECOND_BASE,
            commit="unknown",
            ggml_version=constants.SECOND_BASE_GGML_VERSION,
            package=constants.SECOND_BASE_PACKAGE,
            version=constants.SECOND_BASE_VERSION,
            sdist=constants.SECOND_BASE_SDIST_NAME,
            sha256=constants.SECOND_BASE_SDIST_SHA256,
            folder=constants.SECOND_BASE_SOURCE_FOLDER,
        ),
    )
}


def base_named(name: str) -> Base:
    """The base called `name`; raises PatchError if there is none."""
    if name not in BASES:
        raise PatchError(f"There is no base {name!r}; the patches are for {_all_names()}.")
    return BASES[name]


def identify(tree: Path) -> Base:
    """The base that the unpatched tree is of; raises PatchError, naming what it holds, if it is none of the bases."""
    if not _is_llama_cpp(tree):
        raise PatchError(f"{tree} is no source tree of llama.cpp.")
    nearest, differing = "", list[str]()
    for name, expected in _recorded().items():
        different = [path for path, digest in expected.items() if _digest(tree / path) != digest]
        if not different:
            return BASES[name]
        if not nearest or len(different) < len(differing):
            nearest, differing = name, different
    raise PatchError(
        f"{tree} holds llama.cpp {_describe(tree)}, which is no base of the patches ({_all_names()}): "
        f"{len(differing)} of {len(_recorded()[nearest])} files differ from {nearest}, "
        f"the first is {differing[0]}; check out one of them."
    )


def describe(tree: Path) -> str:
    """What the source tree holds: its base, else what it calls itself; raises PatchError if it is none of llama.cpp."""
    try:
        return identify(tree).name
    except PatchError:
        if not _is_llama_cpp(tree):
            raise
        return _describe(tree)


def _is_llama_cpp(tree: Path) -> bool:
    return (tree / "CMakeLists.txt").is_file() and (tree / "ggml" / "CMakeLists.txt").is_file()


def _digest(path: Path) -> str:
    return sha256_file(path) if path.is_file() else ""


def _all_names() -> str:
    return ", ".join(BASES)


def _describe(tree: Path) -> str:
    """What a foreign tree calls itself: its commit if it is a git checkout, and the version of its ggml."""
    text = (tree / "ggml" / "CMakeLists.txt").read_text(errors="replace")
    version = ".".join(re.findall(r"set\(GGML_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)\)", text)) or "of unknown version"
    commit = ""
    if (tree / ".git").exists():
        command = ["git", "-C", str(tree), "describe", "--tags", "--always"]
        try:
            commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        except OSError:
            commit = ""  # no git here
    return f"{commit + ' ' if commit else ''}(ggml {version})"


def identity_files(series: Series) -> tuple[str, ...]:
    """Files whose content tells the bases apart."""
    return tuple(sorted({*series.touched, *_INTERFACES}))


@cache
def _recorded() -> dict[str, dict[str, str]]:
    loaded: dict[str, dict[str, str]] = json.loads((Path(__file__).parent / "bases.json").read_text())
    return loaded
