"""Patches for llama.cpp, and builds of it with them or without.

`source` fetches the source of a base out of its pinned sdist, `apply`, `remove` and `status` patch any tree of a base,
`build` compiles, and `locate` finds an earlier build. Everything is kept in the cache folder, nothing in the checkout.
"""

from dflash2.builds import Build
from dflash2.patches.apply import Status, apply, remove, status
from dflash2.patches.bases import BASES, Base, describe
from dflash2.patches.build import build, locate
from dflash2.patches.series import Patch, Series, read_series
from dflash2.patches.source import source

__all__ = [
    "BASES",
    "Base",
    "Build",
    "Patch",
    "Series",
    "Status",
    "apply",
    "build",
    "describe",
    "locate",
    "read_series",
    "remove",
    "source",
    "status",
]
