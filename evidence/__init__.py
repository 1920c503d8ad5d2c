"""Proof of unchanged output and measured speed, on the user's own machine.

`verify` compares token ids with drafting and without, `check_distribution` what rejection draws with what the target
gives, `exactness` rows evaluated together with rows evaluated one by one. `bench` measures, and `scaled_target` makes
a copy of a small target that costs what a real one costs.
"""

from dflash2.evidence.bench import Bench, PromptRuns, bench
from dflash2.evidence.datasets import dataset_prompts, file_prompts
from dflash2.evidence.distribution import DISTRIBUTION_CHAINS, DistributionTest, check_distribution
from dflash2.evidence.engines import GREEDY, Engine, PythonEngine, Run, Sampling, opened
from dflash2.evidence.exact import Break, Exactness, Width, exactness
from dflash2.evidence.machine import Machine, this_machine
from dflash2.evidence.parity import Parity, StageResult, parity
from dflash2.evidence.prompts import CATEGORIES, STYLES, Prompt, builtin_prompts, texts
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
    "STYLES",
    "Bench",
    "Break",
    "Candidate",
    "Comparison",
    "Difference",
    "DistributionTest",
    "Engine",
    "Exactness",
    "Judgement",
    "LlamaServerEngine",
    "Machine",
    "ModelFile",
    "Parity",
    "Prompt",
    "PromptRuns",
    "PythonEngine",
    "Result",
    "Run",
    "Sampling",
    "Setting",
    "StageResult",
    "Verification",
    "Width",
    "bench",
    "builtin_prompts",
    "check_distribution",
    "dataset_prompts",
    "exactness",
    "file_prompts",
    "model_files",
    "opened",
    "parity",
    "read_result",
    "scaled_target",
    "texts",
    "this_machine",
    "verify",
    "write_result",
]
