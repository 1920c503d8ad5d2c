"""Parity: which stage of a drafter does llama.cpp compute differently from the PyTorch reference?

Nothing here imports PyTorch before `parity` is called.
"""

from dflash2.evidence.parity.compare import Parity, StageResult, parity

__all__ = ["Parity", "StageResult", "parity"]
