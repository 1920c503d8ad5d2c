"""What a `llama-server` program can do, found out by running it: a version number would only be a guess."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from dflash2.converter import convert
from dflash2.demo import demo_pair

DRAFTING: tuple[tuple[str, ...], ...] = (
    ("--spec-type", "draft-dflash"),
    ("--spec-draft-n-max", "7"),
    ("--spec-draft-model", "drafter.gguf"),
)
_RUN_SECONDS = 30
_START_SECONDS = 120  # a GPU's first start compiles kernels
_ANSWER_TOKENS = 24
_LISTENING = re.compile(r"listening on http://127\.0\.0\.1:(\d+)")
_REFUSED = re.compile(r"invalid argument: (\S+)")
_TROUBLE = re.compile(r"error|fail|wrong|unknown|unsupported|abort|cannot", re.IGNORECASE)
# What llama.cpp's log puts before a message: time and level.
_LOG_PREFIX = re.compile(r"^[\d.]+ [A-Z] +")


@dataclass(frozen=True)
class ServerProbe:
    """What a program showed when it was run.

    Attributes:
        program: the program.
        version: what it says after `version:`, empty if it says nothing like that.
        devices: what it can compute on beside the CPU, a line each as it lists them.
        missing: options that it does not know, of those that were asked for.
        dflash2: whether it loaded a DFlash 2 drafter and drafted with it.
        reason: why `dflash2` is False: a clause that starts with a verb and ends without a full stop ("does not start:
            ..."). Empty otherwise.
    """

    program: Path
    version: str = ""
    devices: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    dflash2: bool = False
    reason: str = ""


def probe_server(
    program: Path,
    options: Sequence[tuple[str, ...]] = (),
    environment: Mapping[str, str] | None = None,
) -> ServerProbe:
    """Run `program` on the demo pair, and say whether it knows DFlash 2; about 0.3 s on a CPU, nothing left behind.

    Args:
        program: a `llama-server`.
        options: command line options besides those for drafting that it must accept, each with its values.
        environment: its environment, by default that of this process; variables named LLAMA_* are left out, which
            would bring in the model, port or key meant for other runs.
    """
    given = os.environ if environment is None else environment
    clean = {name: value for name, value in given.items() if not name.startswith("LLAMA_")}
    probe = ServerProbe(program)
    try:
        probe = _introduced(probe, options, clean)
        if not probe.reason:
            probe = replace(probe, reason=_why_it_does_not_draft(program, clean))
    except OSError as error:
        probe = replace(probe, reason=f"cannot be run: {error.strerror or error}")
    except subprocess.TimeoutExpired:
        probe = replace(probe, reason=f"did not answer within {_RUN_SECONDS} s")
    return replace(probe, dflash2=not probe.reason)


def _introduced(probe: ServerProbe, options: Sequence[tuple[str, ...]], environment: Mapping[str, str]) -> ServerProbe:
    """`probe` with what the program says without a model, and a reason if that rules it out."""
    result = _run(probe.program, ["--version"], environment)
    if trouble := _trouble(result):
        return replace(probe, reason=f"does not start: {trouble}")
    probe = replace(probe, version=_version(result.stdout))
    if not probe.version:
        return replace(probe, reason="is no llama-server: it does not say its version")
    missing, result = _missing_options(probe.program, (*options, *DRAFTING), environment)
    if missing:
        return replace(probe, missing=missing, reason=f"does not know {', '.join(missing)}")
    if trouble := _trouble(result):
        return replace(probe, reason=f"cannot list its devices: {trouble}")
    return replace(probe, devices=_devices(result.stdout))


def _run(program: Path, arguments: Sequence[str], environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Its exit status, and all that it said as `stdout`."""
    return subprocess.run(
        [str(program), *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        check=False,
        timeout=_RUN_SECONDS,
    )


def _missing_options(
    program: Path, options: Sequence[tuple[str, ...]], environment: Mapping[str, str]
) -> tuple[tuple[str, ...], subprocess.CompletedProcess[str]]:
    """Options it refuses, and its last run: it reads the command line in order and `--list-devices`, at the end, exits.

    Help texts leave old names out; only reading a command line proves what is accepted.
    """
    left = list(options)
    missing: list[str] = []
    while True:
        result = _run(program, [word for option in left for word in option] + ["--list-devices"], environment)
        refused = _REFUSED.search(result.stdout) if result.returncode else None
        if refused is None:
            return tuple(missing), result
        missing.append(refused[1])
        kept = [option for option in left if option[0] != refused[1]]
        if len(kept) == len(left):
            return tuple(missing), result
        left = kept


def _trouble(result: subprocess.CompletedProcess[str]) -> str:
    """Why a run did not end well, empty if it did."""
    if result.returncode == 0:
        return ""
    return _last_words(result.returncode, result.stdout.splitlines())


def _last_words(status: int, lines: Sequence[str]) -> str:
    """A program's own words on why it ended with `status`, else what the status says."""
    if status == -signal.SIGILL:
        return "it was built for another CPU (illegal instruction)"
    said = [_LOG_PREFIX.sub("", line).strip() for line in lines if line.strip()]
    troubles = [line for line in said if _TROUBLE.search(line)]
    if troubles:
        return troubles[0]
    if status < 0:
        return f"it was ended by signal {-status}"
    return said[-1] if said else f"exit status {status}"


def _version(output: str) -> str:
    found = re.search(r"^version: *(.+)$", output, re.MULTILINE)
    return found[1].strip() if found else ""


def _devices(output: str) -> tuple[str, ...]:
    lines = output.partition("Available devices:")[2].splitlines()
    return tuple(line.strip() for line in lines if line.strip() not in ("", "(none)"))


def _why_it_does_not_draft(program: Path, environment: Mapping[str, str]) -> str:
    """Serve the demo pair and ask for a few tokens; empty if some of them were drafted."""
    pair = demo_pair()
    with tempfile.TemporaryDirectory() as folder:
        drafter = Path(folder) / "drafter.gguf"
        convert(pair.drafter, pair.target, drafter)
        arguments = ["--model", str(pair.target), "--host", "127.0.0.1", "--port", "0", "--offline"]
        arguments += ["-c", "512", "-np", "1", "-ngl", "0", "-ngld", "0"]
        # On CPUs with AMX, llama.cpp built by gcc crashes on repacked weights (its PR 26954).
        arguments += ["--no-repack", "--spec-type", "draft-dflash", "--spec-draft-model", str(drafter)]
        with _serving([str(program), *arguments], environment) as (port, ended):
            if port is None:
                return f"does not load a DFlash 2 drafter: {ended}"
            try:
                n_drafted = _drafted(port, pair.prompts[0])
            except (OSError, http.client.HTTPException, ValueError) as error:
                return f"does not answer with a DFlash 2 drafter: {error}"
            return "" if n_drafted else "loads a DFlash 2 drafter but drafts nothing"


@contextmanager
def _serving(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[tuple[int | None, str]]:
    """Run a server; yields the port it listens on, or None and why it ended."""
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    )
    watchdog = threading.Timer(_START_SECONDS, process.kill)
    watchdog.start()
    try:
        assert process.stdout is not None
        port, lines = _read_until_listening(process.stdout)
        if port is None:
            yield None, _last_words(process.wait(), lines)
            return
        # A pipe that nobody reads fills up and stops the server.
        drain = threading.Thread(target=process.stdout.read, daemon=True)
        drain.start()
        yield port, ""
    finally:
        watchdog.cancel()
        process.kill()
        process.wait()


def _read_until_listening(output: IO[str]) -> tuple[int | None, list[str]]:
    lines: list[str] = []
    for line in output:
        if found := _LISTENING.search(line):
            return int(found[1]), lines
        lines.append(line)
    return None, lines


def _drafted(port: int, prompt: str) -> int:
    """Number of tokens drafted while a few tokens are generated."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_START_SECONDS)
    try:
        body = json.dumps({"prompt": prompt, "n_predict": _ANSWER_TOKENS, "temperature": 0})
        connection.request("POST", "/completion", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = json.loads(response.read())
    finally:
        connection.close()
    if response.status != http.client.OK:
        raise ValueError(f"HTTP status {response.status}")
    return int(answer.get("timings", {}).get("draft_n", 0))
