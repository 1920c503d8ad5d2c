"""A real server process over HTTP: the answers of plain Llama, whatever comes at the same time."""

import json
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from llama_cpp import Llama

pytest.importorskip("sse_starlette", reason="needs the extra `server`")

START_SECONDS = 60
PROGRAM = """
import json, sys
import uvicorn
from dflash2.runtime.server import PairSettings, ServerSettings, create_app

target, drafter, port, interrupt = sys.argv[1:]
common = dict(model=target, n_ctx=512, n_threads=1, n_threads_batch=1, verbose=False, chat_format="chatml")
models = [
    PairSettings(model_alias="pair", drafter=drafter, depth=7, verify="match", **common),
    PairSettings(model_alias="alone", **common),
]
app = create_app(models, ServerSettings(interrupt_requests=True) if interrupt == "yes" else None)

@app.get("/accepted")
def accepted():
    from llama_cpp.server import app as upstream
    llama = upstream._llama_proxy._current_model
    return {"accepted": llama.stats.accepted if hasattr(llama, "stats") else None}

class Server(uvicorn.Server):
    async def startup(self, sockets=None):
        await super().startup(sockets=sockets)
        print("listening", flush=True)

Server(uvicorn.Config(app, host="127.0.0.1", port=int(port), log_level="error")).run()
"""


class Served:
    """The server process, from the block's beginning to its end."""

    def __init__(self, target, drafter, interrupt):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        arguments = [str(target), str(drafter), str(self.port), interrupt]
        self.command = [sys.executable, "-c", PROGRAM, *arguments]

    def __enter__(self):
        self._process = subprocess.Popen(self.command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        watchdog = threading.Timer(START_SECONDS, self._process.kill)
        watchdog.start()
        lines = iter(self._process.stdout)
        started = any(line.startswith("listening") for line in lines)
        watchdog.cancel()
        assert started, self._process.stderr.read()[-2000:]
        self._drains = [
            threading.Thread(target=pipe.read, daemon=True) for pipe in (self._process.stdout, self._process.stderr)
        ]
        for drain in self._drains:
            drain.start()
        return self

    def __exit__(self, *_):
        self._process.terminate()
        self._process.wait(timeout=30)

    def open(self, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"}
        )
        return urllib.request.urlopen(request, timeout=120)

    def ask(self, path, body=None):
        with self.open(path, body) as response:
            return json.load(response)

    def chunks(self, path, body):
        with self.open(path, {**body, "stream": True}) as response:
            for line in response:
                if line.startswith(b"data: ") and b"[DONE]" not in line:
                    yield json.loads(line.removeprefix(b"data: "))


@pytest.fixture(scope="module")
def served(target_path, drafter_gguf):
    with Served(target_path, drafter_gguf, "no") as server:
        yield server


@pytest.fixture(scope="module")
def plain(target_path):
    llama = Llama(
        str(target_path),
        n_ctx=512,
        n_threads=1,
        n_threads_batch=1,
        flash_attn=True,
        chat_format="chatml",
        verbose=False,
    )
    yield llama
    llama.close()


# The server's own default penalises repetition, that of `Llama` does not.
def completion(prompt, **more):
    return {"prompt": prompt, "max_tokens": 32, "temperature": 0.0, "repeat_penalty": 1.0, **more}


def chat(text, **more):
    return {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 24,
        "temperature": 0.0,
        "repeat_penalty": 1.0,
        **more,
    }


def test_completions_chats_and_streams_equal_plain_llama(served, plain, prompts):
    expected = plain(**completion(prompts[0]))
    got = served.ask("/v1/completions", completion(prompts[0]))
    assert got["choices"] == expected["choices"]
    assert got["usage"] == expected["usage"]
    streamed = "".join(c["choices"][0]["text"] for c in served.chunks("/v1/completions", completion(prompts[0])))
    assert streamed == expected["choices"][0]["text"]
    expected_chat = plain.create_chat_completion(**chat("def f(x):"))["choices"][0]
    got_chat = served.ask("/v1/chat/completions", chat("def f(x):"))["choices"][0]
    assert got_chat["message"]["content"] == expected_chat["message"]["content"]
    deltas = [c["choices"][0]["delta"] for c in served.chunks("/v1/chat/completions", chat("def f(x):"))]
    assert "".join(delta.get("content") or "" for delta in deltas) == expected_chat["message"]["content"]
    assert served.ask("/accepted")["accepted"] > 20


def test_sampling_bias_grammar_and_logprobs_arrive(served, plain, prompts):
    sampled = completion(prompts[1], temperature=0.8, seed=9, top_k=20)
    biased = completion(prompts[1], logit_bias={"301": -100}, stop=["\n\n"])
    for body in (sampled, biased):
        assert served.ask("/v1/completions", body)["choices"] == plain(**body)["choices"]
    shaped = served.ask("/v1/completions", completion(prompts[1], grammar='root ::= "yes" | "no"'))
    assert shaped["choices"][0]["text"] in ("yes", "no")
    logprobs = served.ask("/v1/completions", completion(prompts[1], logprobs=2))["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == 32


def test_concurrent_requests_queue_and_each_gets_its_own_answer(served, plain, prompts):
    expected = [plain(**completion(prompt))["choices"][0]["text"] for prompt in prompts[:6]]

    def ask(i):
        if i % 2:
            chunks = served.chunks("/v1/completions", completion(prompts[i]))
            return "".join(chunk["choices"][0]["text"] for chunk in chunks)
        return served.ask("/v1/completions", completion(prompts[i]))["choices"][0]["text"]

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(ask, range(6))) == expected


def test_models_change_with_and_without_a_drafter(served, plain, prompts):
    expected = plain(**completion(prompts[2]))["choices"]
    assert {model["id"] for model in served.ask("/v1/models")["data"]} == {"pair", "alone"}
    for name in ("alone", "pair"):
        assert served.ask("/v1/completions", completion(prompts[2], model=name))["choices"] == expected
        assert (served.ask("/accepted")["accepted"] is None) == (name == "alone")


def test_a_refused_request_leaves_the_server_answering(served, plain, prompts):
    with pytest.raises(urllib.error.HTTPError) as refused:
        served.ask("/v1/completions", completion(prompts[0] * 30))
    assert refused.value.code == 400
    with pytest.raises(urllib.error.HTTPError):
        served.ask("/v1/embeddings", {"input": "a text"})
    assert (
        served.ask("/v1/completions", completion(prompts[3]))["choices"] == plain(**completion(prompts[3]))["choices"]
    )


def test_a_stream_that_the_next_request_interrupts_spoils_nothing(target_path, drafter_gguf, plain, prompts):
    long = completion(prompts[4], max_tokens=400)
    expected = [plain(**body)["choices"][0]["text"] for body in (long, completion(prompts[5]))]
    with Served(target_path, drafter_gguf, "yes") as server:
        stream = server.chunks("/v1/completions", long)
        begun = next(stream)["choices"][0]["text"]
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(server.ask, "/v1/completions", completion(prompts[5]))
            begun += "".join(chunk["choices"][0]["text"] for chunk in stream)
            assert other.result()["choices"][0]["text"] == expected[1]
        assert expected[0].startswith(begun)
        assert server.ask("/v1/completions", completion(prompts[5]))["choices"][0]["text"] == expected[1]
