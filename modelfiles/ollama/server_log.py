"""What the log of an Ollama on this machine says of drafting: its API has no word for it."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

# Ollama's own place on macOS and Windows; on Linux it runs as a service, whose log is the journal's.
_FILE = Path("~/.ollama/logs/server.log")
_JOURNAL = ("journalctl", "--unit=ollama", "--lines=2000", "--output=cat", "--no-pager", "--quiet")
_JOURNAL_SECONDS = 10
_TAIL_BYTES = 1 << 20
# llama-server's line at the end of every request that drafted.
_ACCEPTANCE = re.compile(
    r"draft acceptance = [\d.]+ \( *(\d+) accepted / *(\d+) generated\)(?:, mean len = *([\d.]+))?"
)


@dataclass(frozen=True)
class Acceptance:
    """Of one request: draft tokens `accepted` of `drafted`; `mean_length` is tokens a cycle, None if not said."""

    accepted: int
    drafted: int
    mean_length: float | None


def last_acceptance(log: str | None = None) -> Acceptance | None:
    """That of the last request that drafted, in `log` or in the server's own log; None if there is none to read."""
    found = _ACCEPTANCE.findall(_read_log() if log is None else log)
    if not found:
        return None
    accepted, drafted, mean_length = found[-1]
    return Acceptance(int(accepted), int(drafted), float(mean_length) if mean_length else None)


def _read_log() -> str:
    """The end of the log; empty if there is none, or this user may not read it."""
    try:
        with _FILE.expanduser().open("rb") as file:
            file.seek(-min(_TAIL_BYTES, file.seek(0, 2)), 2)
            return file.read().decode(errors="replace")
    except (OSError, RuntimeError):  # RuntimeError: no home folder
        return _read_journal()


def _read_journal() -> str:
    if shutil.which(_JOURNAL[0]) is None:
        return ""
    try:
        done = subprocess.run(_JOURNAL, capture_output=True, timeout=_JOURNAL_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace")
