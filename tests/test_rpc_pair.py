"""A pair on the devices of two RPC servers, from Python and by `dflash2 serve`: the text is that of one process.

Needs a patched build with RPC: it is taken from the cache, where `dflash2 build --targets libs,server,rpc` puts it, and
made here only with DFLASH2_FULL=1.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from generation import EXACT
from rpc_server import RpcServer
from served_command import ServedCommand
from test_cli import run

from dflash2.patches import build, locate, read_series

PROBE = Path(__file__).with_name("graph_probe.py")
TARGETS = ("libs", "server", "rpc")
N_TOKENS = 64


@pytest.fixture(scope="module")
def made():
    if os.environ.get("DFLASH2_FULL"):
        return build(targets=TARGETS)
    found = locate(targets=TARGETS)
    if found is None or found.series != read_series().digest:
        pytest.skip(f"needs a patched build with --targets {','.join(TARGETS)}; DFLASH2_FULL=1 makes it")
    return found


@pytest.fixture
def servers(made, tmp_path):
    """Two servers that must both have computed something in the end."""
    program = made.program("ggml-rpc-server")
    with RpcServer(program, tmp_path / "0.log") as first, RpcServer(program, tmp_path / "1.log") as second:
        yield first, second
        assert not first.ended_within(0)
        assert not second.ended_within(0)
        assert sum(first.graphs()) > 0
        assert sum(second.graphs()) > 0


@pytest.fixture
def cycles(made, target_path, drafter_gguf, prompts, tmp_path):
    """Greedy cycles of an object with these options, in a process of its own."""

    def probe(**options):
        job = {"kind": "cycles", "target": str(target_path), "drafter": str(drafter_gguf), "prompts": prompts[:1]}
        job |= {"n_tokens": N_TOKENS, "options": {**EXACT, **options}}
        (tmp_path / "job.json").write_text(json.dumps(job))
        command = [sys.executable, str(PROBE), str(tmp_path / "job.json"), str(tmp_path / "result.npz")]
        environment = {**os.environ, "DFLASH2_LIBRARY": str(made.libraries)}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        assert done.returncode == 0, done.stderr[-2000:]
        with np.load(tmp_path / "result.npz") as result:
            return {name: result[name].tolist() for name in ("tokens", "anchors", "positions", "proposals")}

    return probe


@pytest.mark.parametrize(
    "placement",
    [{}, {"n_gpu_layers": 3}, {"tensor_split": [1.0, 0.0], "device_draft": ["RPC1", "RPC0"]}],
    ids=["all layers", "some layers", "the target on one, the drafter on the other"],
)
def test_an_object_on_two_servers_generates_what_one_at_home_does(cycles, servers, placement):
    away = cycles(rpc_servers=[server.endpoint for server in servers], **placement)
    at_home = cycles()
    assert away == at_home
    assert len(at_home["proposals"]) > 10


_TWICE = """
import sys
from dflash2 import DFlashLlama, native
target, drafter, endpoints = sys.argv[1:]
for _ in range(2):
    with_rpc = DFlashLlama(target, drafter, rpc_servers=endpoints, n_ctx=512, verbose=False)
    with_rpc("def f", max_tokens=8)
    with_rpc.close()
print(*native.device_names())
"""


def test_a_second_object_finds_the_same_devices(made, servers, target_path, drafter_gguf):
    endpoints = ",".join(server.endpoint for server in servers)
    command = [sys.executable, "-c", _TWICE, str(target_path), str(drafter_gguf), endpoints]
    environment = {**os.environ, "DFLASH2_LIBRARY": str(made.libraries)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stdout) == (0, "CPU RPC0 RPC1\n"), done.stderr[-2000:]


@pytest.mark.parametrize("how", [(), ("--python",)], ids=["llama-server", "python"])
def test_serve_answers_from_two_servers_with_the_text_of_run(made, servers, target_path, drafter_gguf, prompts, how):
    if how:
        pytest.importorskip("sse_starlette", reason="needs the extra `server`")
    expected = run("dflash2", "run", target_path, drafter_gguf, prompts[0], "-n", N_TOKENS, "-t", 1)
    named = [server.endpoint for server in servers]
    arguments = (target_path, drafter_gguf, "-t", 1, "--rpc", ",".join(named), *how)
    with ServedCommand(*arguments, DFLASH2_LIBRARY=str(made.libraries)) as served:
        body = {"prompt": prompts[0], "max_tokens": N_TOKENS, "temperature": 0}
        answer = served.client.completions.create(model="any", extra_body={"repeat_penalty": 1.0}, **body)
    assert answer.choices[0].text == expected.stdout.removesuffix("\n")
    assert f"RPC has no authentication and no encryption: whoever reaches {', '.join(named)} can" in served.said


@pytest.mark.usefixtures("made")
def test_an_rpc_server_that_does_not_answer_is_named(target_path, drafter_gguf):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        endpoint = f"127.0.0.1:{closed.getsockname()[1]}"
    done = run("dflash2", "serve", target_path, drafter_gguf, "--port", 0, "--rpc", endpoint)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: no RPC server answers at {endpoint} (")
