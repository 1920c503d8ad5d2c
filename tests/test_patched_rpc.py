"""Target and drafter split between two RPC servers: the drafts are those of one process, whichever end is patched.

Both libraries need the RPC client, and so builds of their own: they are taken from the cache, where
`dflash2 build --targets libs,server,rpc` puts them, and the same with --stock. They are made here only with
DFLASH2_FULL=1.
"""

import json
import os
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
from generation import EXACT
from llama_server import LlamaServer
from rpc_server import RpcServer
from server_pair import EXACT_CACHE_OPTIONS, EXACT_DRAFT_CACHE_OPTIONS, server_arguments

from dflash2.errors import BuildError
from dflash2.patches import build, locate, read_series

PROBE = Path(__file__).with_name("graph_probe.py")
FULL = bool(os.environ.get("DFLASH2_FULL"))
TARGETS = ("libs", "server", "rpc")
ENDS = ("patched", "stock")
N_PROMPTS, N_TOKENS = 2, 300  # past the first 256 cells of the caches
# Layers of both models on both servers; or all of the target on one and of the drafter, but its head, on the other.
PLACEMENTS = {
    "layers": {"n_gpu_layers": -1},
    "models": {"n_gpu_layers": -1, "tensor_split": [1.0, 0.0], "device_draft": ["RPC1", "RPC0"]},
}


@pytest.fixture(scope="module")
def builds():
    """The patched and the stock llama.cpp, both with RPC."""
    try:
        if FULL:
            return {end: build(stock=end == "stock", targets=TARGETS) for end in ENDS}
        found = {end: locate(stock=end == "stock", targets=TARGETS) for end in ENDS}
    except BuildError as error:
        pytest.skip(str(error))
    if None in found.values() or found["patched"].series != read_series().digest:
        pytest.skip("needs builds with --targets libs,server,rpc, patched and --stock; DFLASH2_FULL=1 makes them")
    return found


@pytest.fixture(scope="module")
def probe(builds, target_path, drafter_gguf, tmp_path_factory):
    """Runs a job on the demo pair: with the library of `client`, and one server of each build in `servers`."""

    def run(kind, client, servers=(), **job):
        folder = tmp_path_factory.mktemp("rpc")
        with ExitStack() as stack:
            programs = [builds[end].program("ggml-rpc-server") for end in servers]
            logs = [folder / f"server{i}.log" for i in range(len(servers))]
            running = [stack.enter_context(RpcServer(*given)) for given in zip(programs, logs, strict=True)]
            job |= {"kind": kind, "target": str(target_path), "drafter": str(drafter_gguf)}
            job["rpc"] = [server.endpoint for server in running]
            (folder / "job.json").write_text(json.dumps(job))
            kept = {name: value for name, value in os.environ.items() if not name.startswith("DFLASH2_NO_")}
            kept.pop("DFLASH2_LIBRARY", None)
            environment = {**kept, "LLAMA_CPP_LIB_PATH": str(builds[client].libraries)}
            command = [sys.executable, str(PROBE), str(folder / "job.json"), str(folder / "result.npz")]
            done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
            assert done.returncode == 0, done.stderr[-2000:] + "".join(log.read_text()[-1000:] for log in logs)
            assert not any(server.ended_within(0) for server in running)
            assert all(sum(server.graphs()) > 0 for server in running)
        with np.load(folder / "result.npz") as result:
            return dict(result)

    return run


@pytest.fixture(scope="module")
def cycles(probe, prompts):
    """Greedy cycles with these options of the runtime."""

    def run(client, servers=(), **options):
        job = {"prompts": prompts[:N_PROMPTS], "n_tokens": N_TOKENS, "options": {**EXACT, **options}}
        return probe("cycles", client, servers, **job)

    return run


@pytest.fixture(scope="module")
def at_home(cycles):
    """What the stock library computes in its own process."""
    return cycles("stock")


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("servers", [("patched", "patched"), ("stock", "stock"), ("patched", "stock")])
@pytest.mark.parametrize("client", ENDS)
def test_drafts_are_the_same_over_rpc(cycles, at_home, client, servers, placement):
    found = cycles(client, servers, **PLACEMENTS[placement])
    assert len(found["proposals"]) > 50
    assert np.all(found["rebuilds"] >= 0) == (client == "patched")
    for name in ("tokens", "anchors", "positions", "proposals"):
        assert np.array_equal(found[name], at_home[name]), name


@pytest.fixture(scope="module")
def answers(builds, target_path, exact_drafters, prompts, tmp_path_factory):
    """What the llama-server of `client` answers: [(tokens, drafted, accepted)]; `servers` and `options` as above."""

    def run(client, servers=(), *options):
        folder = tmp_path_factory.mktemp("rpc-server")
        with ExitStack() as stack:
            programs = [builds[end].program("ggml-rpc-server") for end in servers]
            running = [stack.enter_context(RpcServer(given, folder / f"{i}.log")) for i, given in enumerate(programs)]
            everything = ("--gpu-layers", "99", "--spec-draft-ngl", "99")
            away = ("--rpc", ",".join(server.endpoint for server in running), *everything, *options) if servers else ()
            exact = (*EXACT_CACHE_OPTIONS, *EXACT_DRAFT_CACHE_OPTIONS, "--no-repack")  # RPC has no other layouts
            arguments = [*server_arguments(target_path, exact_drafters["v2"]), *exact, *away]
            server = stack.enter_context(LlamaServer(builds[client].server, arguments, folder / "server.log"))
            given = [server.answer(prompt, N_TOKENS, temperature=0.0) for prompt in prompts[:5]]
            assert all(sum(server.graphs()) > 0 for server in running)
        return [(a["tokens"], a["timings"]["draft_n"], a["timings"]["draft_n_accepted"]) for a in given]

    return run


@pytest.fixture(scope="module")
def at_home_answers(answers):
    return {client: answers(client) for client in ENDS}


@pytest.mark.parametrize("options", [(), ("--tensor-split", "1,0", "--spec-draft-device", "RPC1,RPC0")], ids=PLACEMENTS)
@pytest.mark.parametrize("servers", [("patched", "patched"), ("stock", "stock"), ("patched", "stock")])
@pytest.mark.parametrize("client", ENDS)
def test_llama_server_answers_the_same_over_rpc(answers, at_home_answers, client, servers, options):
    expected = at_home_answers[client]
    assert all(accepted > 0 for _, _, accepted in expected)
    assert answers(client, servers, *options) == expected


@pytest.mark.parametrize("servers", [("patched", "patched"), ("stock", "stock")])
def test_the_compact_lattice_of_several_sequences_comes_over_rpc(probe, servers):
    job = {"unified": True, "blocks": [[0, 20, 8], [1, 27, 3], [2, 34, 5]]}
    away, at_home = probe("sequences", "patched", servers, n_gpu_layers=-1, **job), probe("sequences", "patched", **job)
    for name, block in at_home.items():
        assert np.array_equal(away[name], block), name


_REFUSED = """
import sys
from dflash2.errors import NativeError
from dflash2.native import add_rpc_server, device_names
for endpoint in sys.argv[1:]:
    try:
        add_rpc_server(endpoint)
    except NativeError as error:
        print(error)
print(device_names())
"""


def test_what_is_no_rpc_server_is_refused(builds):
    """ggml itself aborts on each of them."""
    with ExitStack() as stack:
        closed, deaf, other = (stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3))
        endpoints = ["127.0.0.1", "127.0.0.1:http", *(f"127.0.0.1:{s.getsockname()[1]}" for s in (closed, deaf, other))]
        closed.close()
        stack.enter_context(answering(deaf, b""))
        stack.enter_context(answering(other, b"HTTP/1.1 400 Bad Request\r\n\r\n"))
        environment = {**os.environ, "LLAMA_CPP_LIB_PATH": str(builds["patched"].libraries)}
        command = [sys.executable, "-c", _REFUSED, *endpoints]
        lines = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.splitlines()
    assert lines[:2] == [f"an RPC server is named by host:port, not {endpoint!r}." for endpoint in endpoints[:2]]
    for endpoint, line in zip(endpoints[2:4], lines[2:4], strict=True):
        assert line.startswith(f"no RPC server answers at {endpoint} (")
    assert lines[4] == f"the RPC server at {endpoints[4]} is of another version than this llama.cpp library."
    assert lines[5] == "('CPU',)"


@contextmanager
def answering(listener, answer):
    """Whoever connects to `listener` first gets `answer` and is hung up on."""

    def serve():
        connection, _ = listener.accept()
        with connection:
            connection.recv(64)
            connection.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    yield
    thread.join()
