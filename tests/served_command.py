"""A real `dflash2 serve` process for the tests."""

import os
import re
import select
import subprocess
import sys
import threading
from pathlib import Path

import openai

PROGRAM = Path(sys.executable).parent / "dflash2"
START_SECONDS = 120
_READY = re.compile(r"ready at (\S+): ")


class ServedCommand:
    """`dflash2 serve` with these arguments, on a free port, from the block's beginning to its end.

    Attributes:
        url: where it answers.
        shown: the lines of its standard output until then, and `said`, complete once it has ended, its standard error.
    """

    def __init__(self, *arguments: object, **variables: str):
        self.command = [str(PROGRAM), "serve", "--port", "0", *map(str, arguments)]
        self._environment = {**os.environ, **variables}

    def __enter__(self) -> "ServedCommand":
        self.process = subprocess.Popen(
            self.command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=self._environment
        )
        errors: list[str] = []
        self._drain = threading.Thread(target=lambda: errors.extend(self.process.stderr))
        self._drain.start()
        self._errors = errors
        watchdog = threading.Timer(START_SECONDS, self.process.kill)
        watchdog.start()
        self.shown, self.url = [], None
        for line in self.process.stdout:
            self.shown.append(line.rstrip("\n"))
            if found := _READY.match(line):
                self.url = found[1]
            if line.startswith("openai."):
                break
        watchdog.cancel()
        if self.url is None:
            self.__exit__()
            raise AssertionError(f"dflash2 serve did not start:\n{self.said}")
        return self

    @property
    def said(self) -> str:
        return "".join(self._errors)

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    @property
    def child(self) -> int:
        """Process id of the server that it runs."""
        (child,) = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(child)

    def end(self) -> int:
        """The exit status, once it has ended."""
        status = self.process.wait(timeout=60)
        self._drain.join(timeout=60)
        return status

    def __exit__(self, *_):
        self.process.terminate()
        self.end()


def ends(pidfd: int) -> bool:
    """Whether the process ends; waited for."""
    return bool(select.select([pidfd], [], [], 60)[0])
