"""A real `ggml-rpc-server` process for the tests."""

import os
import re
import socket
import subprocess
from pathlib import Path

_START_SECONDS = 30
_RETRY_SECONDS = 0.05
_COMPUTED = ("graph_compute", "graph_recompute")


class RpcServer:
    """Runs the program, which lends this machine's CPU with one thread, on a free loopback port until exit."""

    def __init__(self, program: Path, log: Path):
        self.program, self.log = program, log

    def __enter__(self) -> "RpcServer":
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.endpoint = f"127.0.0.1:{port}"
        self._output = self.log.open("w")
        command = [str(self.program), "--host", "127.0.0.1", "--port", str(port), "--threads", "1"]
        told = {**os.environ, "GGML_RPC_DEBUG": "1"}  # a line for every request
        self._process = subprocess.Popen(command, stdout=self._output, stderr=subprocess.STDOUT, env=told)
        for _ in range(int(_START_SECONDS / _RETRY_SECONDS)):
            try:
                socket.create_connection(("127.0.0.1", port)).close()
            except ConnectionRefusedError:
                if self.ended_within(_RETRY_SECONDS):
                    break
            else:
                return self
        self.__exit__()
        raise AssertionError(f"ggml-rpc-server did not start:\n{self.log.read_text()[-2000:]}")

    def graphs(self) -> tuple[int, int]:
        """How many graphs came to be computed, and how often the last one was computed again."""
        said = self.log.read_text()
        return tuple(len(re.findall(rf"^\[{name}\] device", said, re.MULTILINE)) for name in _COMPUTED)

    def ended_within(self, seconds: float) -> bool:
        """Whether the process ends by itself, waiting for that so long."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def __exit__(self, *_):
        self._process.terminate()
        self._process.wait(timeout=30)
        self._output.close()
