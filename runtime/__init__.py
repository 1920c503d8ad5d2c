"""The DFlash 2 loop inside llama-cpp-python: inject, draft, select, verify, accept, rollback."""

from dflash2.runtime.lattice import Lattice
from dflash2.runtime.llama_compat import DFlashLlama
from dflash2.runtime.pair import DrafterSpec, read_pair
from dflash2.runtime.planning import Depth
from dflash2.runtime.sampling import Verify
from dflash2.runtime.select import select
from dflash2.runtime.stats import CycleRecord, DraftStats

__all__ = [
    "CycleRecord",
    "DFlashLlama",
    "Depth",
    "DraftStats",
    "DrafterSpec",
    "Lattice",
    "Verify",
    "read_pair",
    "select",
]
