"""Proof of unchanged output and measured speed, on the user's own machine.

`verify` compares token ids with drafting and without, `bench` measures both, and `scaled_target` makes a copy of a
small target that costs what a real one costs.
"""

from dflash2.evidence.bench import Bench, PromptRuns, bench
from dflash2.evidence.engines import GREEDY, Engine, PythonEngine, Run, Sampling, opened
from dflash2.evidence.machine import Machine, this_machine
from dflash2.evidence.prompts import CATEGORIES, STYLES, Prompt, builtin_prompts, texts
from dflash2.evidence.results import ModelFile, Result, model_files, read_result, write_result
from dflash2.evidence.scaled_target import scaled_target
from dflash2.evidence.server_engine import LlamaServerEngine
from dflash2.evidence.verify import Difference, Verification, verify

__all__ = [
    "CATEGORIES",
    "GREEDY",
    "STYLES",
    "Bench",
    "Difference",
    "Engine",
    "LlamaServerEngine",
    "Machine",
    "ModelFile",
    "Prompt",
    "PromptRuns",
    "PythonEngine",
    "Result",
    "Run",
    "Sampling",
    "Verification",
    "bench",
    "builtin_prompts",
    "model_files",
    "opened",
    "read_result",
    "scaled_target",
    "texts",
    "this_machine",
    "verify",
    "write_result",
]
