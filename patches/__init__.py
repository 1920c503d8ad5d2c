"""Builds of llama.cpp from the source inside the pinned llama-cpp-python sdist.

`source` fetches and unpacks it, `build` compiles its unpatched `llama-server` (the peer that tests compare with), and
`locate` finds an earlier build. Everything is kept in the cache folder, nothing in the checkout.
"""

from dflash2.patches.build import Build, build, locate
from dflash2.patches.source import source

__all__ = ["Build", "build", "locate", "source"]
