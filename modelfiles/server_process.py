"""A running `llama-server`: it ends when we end, and what it said last is kept."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import signal
import ssl
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from dflash2.errors import ServerError
from dflash2.modelfiles.serving import Address
from dflash2.native import dies_with_parent

_KEPT_LINES = 20
_LONGEST_LINE = 4096  # characters; the rest of a longer one comes as another
_POLL_SECONDS = 0.1
_ANSWER_SECONDS = 5.0
_GRACE_SECONDS = 15.0  # requests that run are broken off; memory of a GPU takes its time
# llama.cpp's log: time, level, message; of levels below an error nothing explains an end.
_LOG_LINE = re.compile(r"^[\d.]+ ([A-Z]) +(.*)$")
_TELLING = re.compile(r"error|fail|assert|abort|invalid|unknown|cannot|couldn't", re.IGNORECASE)
# Said in every start with a drafter, while memory is measured.
_HARMLESS = ("during memory fitting", "common_fit_params")
_MEMORY = re.compile(r"memory|\balloc", re.IGNORECASE)
_LESS_MEMORY = (
    "For less memory, start it again with a smaller --ctx-size (-c), fewer --gpu-layers or a smaller quantisation."
)
_SAID = "Its last lines:"


class StopRequest:
    """How often a stop was asked for; by a signal handler, too."""

    def __init__(self) -> None:
        self.count = 0

    def ask(self) -> None:
        """Ask for it once more."""
        self.count += 1


class ServerProcess:
    """The child process, from its start until it is stopped or ends by itself.

    To be started, and waited for, by the main thread. What it writes is read all the time, kept for a while, and handed
    to `on_line` by another thread.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        stop: StopRequest,
        environment: Mapping[str, str] | None = None,
        on_line: Callable[[str], None] | None = None,
    ) -> None:
        """Start `command` with these variables besides those of this process; raises ServerError if it is none.

        Once a `stop` is asked for, waiting ends.
        """
        self._name = Path(command[0]).name
        self._stop = stop
        self._last: deque[str] = deque(maxlen=_KEPT_LINES)
        self._on_line = on_line
        try:
            self._process = subprocess.Popen(
                command,
                # A debugger that ggml would start for a backtrace must not hang on to a server that crashes.
                env={**os.environ, "GGML_NO_BACKTRACE": "1", **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                encoding="utf-8",
                errors="replace",
                # Ctrl-C of the terminal comes to us alone, and a script around the server ends together with it.
                start_new_session=True,
                preexec_fn=dies_with_parent(),  # noqa: PLW1509 (it calls prctl and nothing else)
            )
        except OSError as error:
            raise ServerError(f"{command[0]} cannot be run: {error.strerror or error}.") from error
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def ended(self) -> str | None:
        """How it ended ("exit status 1", "by SIGKILL"); None while it runs."""
        status = self._process.poll()
        if status is None:
            return None
        return f"exit status {status}" if status >= 0 else f"by {_signal_name(-status)}"

    def wait_until_ready(self, address: Address) -> bool:
        """Wait until it answers requests; False if a stop is asked for before.

        Raises ServerError, with the reason in its own words, if it ends.
        """
        while not self._stop.count:
            if self.ended is not None:
                why = "killed from outside, mostly for lack of memory" if self._was_killed else self._why()
                advice = f" {_LESS_MEMORY}" if self._was_killed or _MEMORY.search(why) else ""
                raise ServerError(f"{self._name} ended while it was starting ({self.ended}): {why}.{advice}")
            if _is_healthy(address):
                return True
            self._pause()
        return False

    def wait(self) -> None:
        """Wait until a stop is asked for; raises ServerError, with what to do and its last lines, if it ends before."""
        while self.ended is None:
            if self._stop.count:
                return
            self._pause()
        self._reader.join(_ANSWER_SECONDS)
        said = "\n".join([_SAID, *self._last]) if self._last else "It said nothing."
        raise ServerError(f"{self._name} ended by itself ({self.ended}). {self._advice()}\n{said}")

    def stop(self) -> None:
        """End it: politely, and by force if it does not within seconds or a stop is asked for once more."""
        if self.ended is None:
            self._send("SIGTERM")
            asked, begin = self._stop.count, time.monotonic()
            while self.ended is None:
                if self._stop.count > asked or time.monotonic() - begin > _GRACE_SECONDS:
                    self._send("SIGKILL")
                    break
                self._pause()
        self._process.wait()
        self._reader.join(_ANSWER_SECONDS)

    def _send(self, name: str) -> None:
        if os.name == "posix":
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.killpg(self._process.pid, getattr(signal, name))
        else:
            self._process.terminate()

    def _pause(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_POLL_SECONDS)

    def _read(self) -> None:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline(_LONGEST_LINE):
            self._last.append(line.rstrip("\n"))
            if self._on_line is not None:
                try:
                    self._on_line(self._last[-1])
                except OSError:  # nobody looks any more; the server must still be read from, or it would stand still
                    self._on_line = None

    def _why(self) -> str:
        """The first line that tells of an error, else the last of all."""
        self._reader.join(_ANSWER_SECONDS)
        said = [line for line in self._last if line.strip()]
        if not said:
            return "it said nothing"
        telling = (_trouble(line) for line in said)
        return next((line for line in telling if line), said[-1]).strip().rstrip(".")

    @property
    def _was_killed(self) -> bool:
        return self._process.poll() == -getattr(signal, "SIGKILL", 9)

    def _advice(self) -> str:
        if self._was_killed:
            return f"It was killed from outside, mostly for lack of memory. {_LESS_MEMORY}"
        return "Start it again; if that repeats itself, --depth 1 or another build (`dflash2 build`) shows what it is."


def _trouble(line: str) -> str:
    """What `line` says of an error, empty if it does not."""
    logged = _LOG_LINE.match(line)
    if any(part in line for part in _HARMLESS):
        return ""
    if logged:
        return logged[2] if logged[1] == "E" else ""
    return line if _TELLING.search(line) else ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _is_healthy(address: Address) -> bool:
    if address.secure:  # with a certificate of the user's own making, most often
        context = ssl._create_unverified_context()
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            address.connect, address.port, timeout=_ANSWER_SECONDS, context=context
        )
    else:
        connection = http.client.HTTPConnection(address.connect, address.port, timeout=_ANSWER_SECONDS)
    try:
        connection.request("GET", f"{address.prefix}/health")
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
