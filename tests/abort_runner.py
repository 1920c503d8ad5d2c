"""Opens pairs, each in a fork of this process: `python abort_runner.py JOBS.json RESULTS.json`.

A job is {target, drafter, options, call, before}; its result is the exit status (negative: the signal that ended it)
and the error as "Class: message". Forks save the import of llama_cpp per job.
"""

import json
import os
import sys
import traceback
from pathlib import Path

COMMON = {"n_ctx": 256, "n_threads": 1, "n_threads_batch": 1, "verbose": False}


def attempt(job: dict) -> str:
    """What went wrong with one job, empty if nothing did."""
    from dflash2.errors import Dflash2Error  # nothing native yet

    exec(job["before"], {})
    try:
        from dflash2 import DFlashLlama

        llm = DFlashLlama(job["target"], job["drafter"], **{**COMMON, **job["options"]})
        exec(job["call"], {"llm": llm})
    except Dflash2Error as error:
        return f"{type(error).__name__}: {error}"
    except BaseException:
        return "NOT OURS " + traceback.format_exc()
    return ""


def forked(job: dict) -> tuple[int, str]:
    """(exit status, error) of one job in a fork."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        os.write(writer, attempt(job).encode()[:4000])
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        said = pipe.read().decode()
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), said


if __name__ == "__main__":
    jobs = json.loads(Path(sys.argv[1]).read_text())
    if len(jobs) > 1:
        import dflash2.runtime  # noqa: F401
    Path(sys.argv[2]).write_text(json.dumps({name: forked(job) for name, job in jobs.items()}))
