"""A real `llama-server` process for the tests."""

import json
import os
import re
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

_LISTENING = re.compile(r"listening on (http://127\.0\.0\.1:\d+)")


@dataclass(frozen=True)
class Completion:
    """Generated token ids, and (drafted, accepted) of every cycle, from the counters that come with each token."""

    tokens: list[int]
    cycles: list[tuple[int, int]]
    stop_type: str


class LlamaServer:
    """Starts the program with `arguments` on a free loopback port, waits until it listens, and stops it on exit."""

    def __init__(
        self,
        program: Path,
        arguments: list[str],
        log: Path,
        environment: dict[str, str] | None = None,
        start_seconds: float = 120,
    ):
        """`environment`: variables set besides those of this process; `start_seconds`: after which it is given up."""
        self._start_seconds = start_seconds
        self._environment = {**os.environ, **(environment or {})}
        self.command = [str(program), "--host", "127.0.0.1", "--port", "0", "--offline", "--no-ui", *arguments]
        self.log = log

    def __enter__(self) -> "LlamaServer":
        self._output = self.log.open("w")
        self._process = subprocess.Popen(
            self.command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=self._environment,
        )
        watchdog = threading.Timer(self._start_seconds, self._process.kill)
        watchdog.start()
        url = self._read_until_listening()
        watchdog.cancel()
        if url is None:
            self.__exit__()
            raise AssertionError(f"llama-server did not start:\n{self.log.read_text()[-2000:]}")
        self.url = url
        self._drain = threading.Thread(target=self._read_until_listening, daemon=True)
        self._drain.start()
        return self

    def _read_until_listening(self) -> str | None:
        for line in self._process.stdout:
            self._output.write(line)
            self._output.flush()
            if found := _LISTENING.search(line):
                return found[1]
        return None

    def __exit__(self, *_):
        self._process.terminate()
        self.exit_code = self._process.wait(timeout=30)
        self._output.close()

    def complete(self, prompt: list[int], n_predict: int) -> Completion:
        """Greedy completion of token ids, nothing reused from the request before."""
        request = {
            "prompt": prompt,
            "n_predict": n_predict,
            "temperature": 0,
            "cache_prompt": False,
            "stream": True,
            "return_tokens": True,
            "timings_per_token": True,
        }
        counters, tokens, stop_type = [(0, 0)], [], ""
        for event in self.stream("/completion", request):
            tokens += event["tokens"]
            timings = event["timings"]
            counters.append((timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)))
            stop_type = event.get("stop_type", stop_type)
        assert len(tokens) == timings["predicted_n"], "a token came without its event (text that is not UTF-8)"
        # Every token of one cycle carries the same running totals.
        changes = [(b, a) for a, b in pairwise(counters) if a != b]
        return Completion(tokens, [(n1 - n0, a1 - a0) for (n1, a1), (n0, a0) in changes], stop_type)

    def answer(self, prompt: list[int], n_predict: int, **options) -> dict:
        """The whole answer to one request as llama-server words it; nothing reused unless `options` ask for it."""
        request = {"prompt": prompt, "n_predict": n_predict, "cache_prompt": False, "return_tokens": True, **options}
        return self.post("/completion", request)

    def post(self, path: str, request: dict) -> dict:
        """The JSON that `request` is answered with."""
        with self._open(path, request) as response:
            return json.load(response)

    def _open(self, path: str, request: dict):
        body = json.dumps(request).encode()
        return urllib.request.urlopen(urllib.request.Request(self.url + path, data=body), timeout=300)

    def stream(self, path: str, request: dict) -> Iterator[dict]:
        """The events that `request`, which asks for a stream, is answered with, as they come."""
        with self._open(path, request) as response:
            for line in response:
                if line.startswith(b"data: "):
                    yield json.loads(line.removeprefix(b"data: "))
