"""Proof of unchanged output and measured speed, on the user's own machine.

`verify` compares token ids with drafting and without, `check_distribution` what rejection draws with what the target
gives, `exactness` rows evaluated together with rows evaluated one by one. `analyze` says why acceptance is what it is,
`parity` whether llama.cpp computes the drafter that was trained. `bench` measures, `html` shows saved results, and
`scaled_target` makes a copy of a small target that costs what a real one costs.
"""

from dflash2.evidence.analyze import Analysis, Bin, Calibration, Lengths, Observed, Position, analyze, summarize
from dflash2.evidence.bench import Bench, Measured, PromptRuns, Variant, bench, measure
from dflash2.evidence.compare import PLAIN, BenchComparison, Change, bench_rows, compare_benches
from dflash2.evidence.datasets import dataset_prompts, file_prompts
from dflash2.evidence.distribution import DISTRIBUTION_CHAINS, DistributionTest, check_distribution
from dflash2.evidence.engines import GREEDY, Engine, PythonEngine, Run, Sampling, opened
from dflash2.evidence.exact import Break, Exactness, Width, exactness
from dflash2.evidence.intervals import MedianInterval, median_interval
from dflash2.evidence.lattices import CycleLattice, LatticePosition, Offered, cycle_lattice
from dflash2.evidence.machine import Machine, Memory, memory_taken, this_machine
from dflash2.evidence.parity import Parity, StageResult, parity
from dflash2.evidence.prompts import CATEGORIES, STYLES, Prompt, builtin_prompts, texts
from dflash2.evidence.report import Section, html, read_section, write_pngs
from dflash2.evidence.results import ModelFile, Result, model_files, read_result, write_result
from dflash2.evidence.scaled_target import scaled_target
from dflash2.evidence.server_engine import LlamaServerEngine
from dflash2.evidence.ties import Candidate, Judgement
from dflash2.evidence.verify import (
    END,
    GREEDILY,
    IN_PROCESS,
    OVER_URL,
    Comparison,
    Difference,
    Setting,
    Verification,
    verify,
)

__all__ = [
    "CATEGORIES",
    "DISTRIBUTION_CHAINS",
    "END",
    "GREEDILY",
    "GREEDY",
    "IN_PROCESS",
    "OVER_URL",
    "PLAIN",
    "STYLES",
    "Analysis",
    "Bench",
    "BenchComparison",
    "Bin",
    "Break",
    "Calibration",
    "Candidate",
    "Change",
    "Comparison",
    "CycleLattice",
    "Difference",
    "DistributionTest",
    "Engine",
    "Exactness",
    "Judgement",
    "LatticePosition",
    "Lengths",
    "LlamaServerEngine",
    "Machine",
    "Measured",
    "MedianInterval",
    "Memory",
    "ModelFile",
    "Observed",
    "Offered",
    "Parity",
    "Position",
    "Prompt",
    "PromptRuns",
    "PythonEngine",
    "Result",
    "Run",
    "Sampling",
    "Section",
    "Setting",
    "StageResult",
    "Variant",
    "Verification",
    "Width",
    "analyze",
    "bench",
    "bench_rows",
    "builtin_prompts",
    "check_distribution",
    "compare_benches",
    "cycle_lattice",
    "dataset_prompts",
    "exactness",
    "file_prompts",
    "html",
    "measure",
    "median_interval",
    "memory_taken",
    "model_files",
    "opened",
    "parity",
    "read_result",
    "read_section",
    "scaled_target",
    "summarize",
    "texts",
    "this_machine",
    "verify",
    "write_pngs",
    "write_result",
]
