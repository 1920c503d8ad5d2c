"""Proof of unchanged output and measured speed, on the user's own machine.

`verify` compares token ids with drafting and without, `bench` measures both, and `scaled_target` makes a copy of a
small target that costs what a real one costs.
"""

from dflash2.evidence.bench import Bench, PromptRuns, bench
from dflash2.evidence.runs import Run
from dflash2.evidence.scaled_target import scaled_target
from dflash2.evidence.verify import Difference, Verification, verify

__all__ = ["Bench", "Difference", "PromptRuns", "Run", "Verification", "bench", "scaled_target", "verify"]
