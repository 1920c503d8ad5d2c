"""The patched llama.cpp that tests use, in a process of their own because this one has the stock library."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

_RUNNER = Path(__file__).with_name("patched_runner.py")


def run_patched(folder: Path, scratch: Path, jobs: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Results of `patched_runner.py` with the library in `folder`."""
    given, results = scratch / "jobs.json", scratch / "results.json"
    given.write_text(json.dumps(jobs))
    environment = {**os.environ, "DFLASH2_LIBRARY": str(folder)}
    environment.pop("LLAMA_CPP_LIB_PATH", None)
    command = [sys.executable, str(_RUNNER), str(given), str(results)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(results.read_text())
