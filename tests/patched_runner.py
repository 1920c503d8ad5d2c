"""Generates with and without a drafter in a process of its own: `python patched_runner.py JOBS.json RESULTS.json`.

The library is chosen before llama_cpp is imported, so the process of the tests, which has the stock one, cannot do it.
A job is {target, drafter, prompts, n_tokens, options}, prompts as text or token ids; its result is {plain, drafted,
proposed, accepted, whole_blocks, patched}: token ids for each prompt, and counts over all of them. A job
{"ask": "taps"} gets the tappable architectures instead.
"""

import json
import sys
from pathlib import Path
from typing import Any

from generation import EXACT, take_greedy


def run(job: dict[str, Any]) -> dict[str, Any]:
    """The result of one job."""
    from dflash2 import native

    if job.get("ask") == "taps":
        final = sorted(native.final_tap_architectures())
        return {"tappable": sorted(native.tappable_architectures()), "final": final}
    from dflash2 import DFlashLlama

    patched = native.library().patched
    from llama_cpp import Llama

    options = {**EXACT, **job["options"]}
    plain = Llama(job["target"], **options)
    prompts = [plain.tokenize(given.encode()) if isinstance(given, str) else given for given in job["prompts"]]
    expected = [take_greedy(plain, prompt, job["n_tokens"]) for prompt in prompts]
    plain.close()
    llama = DFlashLlama(job["target"], job["drafter"], depth=None, auto_disable=False, **options)
    drafted = [take_greedy(llama, prompt, job["n_tokens"]) for prompt in prompts]
    stats = llama.stats
    llama.close()
    return {
        "plain": expected,
        "drafted": drafted,
        "proposed": stats.drafted,
        "accepted": stats.accepted,
        "whole_blocks": stats.accepted_at[-1],
        "patched": patched,
    }


if __name__ == "__main__":
    jobs = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps({name: run(job) for name, job in jobs.items()}))
