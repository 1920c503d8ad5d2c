"""The `llama-server` processes that an Ollama on this machine has started: Ollama's API does not say what they do."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import httpx
import psutil

_TIMEOUT_SECONDS = 5
_BLOB = re.compile(r"sha256-([0-9a-f]{64})$")


@dataclass(frozen=True)
class Runner:
    """One process: `base` and `draft` are digests (`sha256:...`) of the blobs it was started with.

    `spec_type` and `n_max` (draft tokens) are None if it was not told to draft, `n_parallel` is how many requests it
    serves at once, `port` where it listens on loopback.
    """

    base: str
    draft: str | None
    spec_type: str | None
    n_max: int | None
    n_parallel: int
    port: int | None

    def speculates(self) -> bool | None:
        """Whether it says that it drafts; None if it does not answer, or not that."""
        try:
            slots = httpx.get(f"http://127.0.0.1:{self.port}/slots", timeout=_TIMEOUT_SECONDS, trust_env=False).json()
            return any(slot["speculative"] is True for slot in slots)
        except (httpx.HTTPError, ValueError, TypeError, KeyError):
            return None


def running() -> tuple[Runner, ...]:
    """Those whose command line may be read, in order of their process ids."""
    lines = (process.info["cmdline"] for process in psutil.process_iter(["cmdline"]))
    return tuple(runner for line in lines if line and (runner := read_runner(line)))


def read_runner(command: Sequence[str]) -> Runner | None:
    """The runner with this command line; None if it is something else."""
    base = _digest(_value(command, "--model"))
    if base is None:
        return None
    return Runner(
        base,
        _digest(_value(command, "--spec-draft-model")),
        _value(command, "--spec-type"),
        _number(_value(command, "--spec-draft-n-max")),
        _number(_value(command, "-np")) or 1,
        _number(_value(command, "--port")),
    )


def _value(command: Sequence[str], option: str) -> str | None:
    """What follows `option`; the last one counts, as for llama.cpp."""
    found = [value for name, value in pairwise(command) if name == option]
    return found[-1] if found else None


def _digest(path: str | None) -> str | None:
    match = _BLOB.search(path or "")
    return f"sha256:{match[1]}" if match else None


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() else None
