"""`dflash2 serve` as a user runs it: the real server, asked by OpenAI's client, and how both of them end."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import openai
import pytest
from served_command import ServedCommand, ends
from test_cli import run

from dflash2.patches import build

pytestmark = pytest.mark.usefixtures("patched")
N_TOKENS = 48
# One thread: with F16 caches the CPU's numbers depend on the rows of a batch otherwise (README, "What is exact").
ALONE = ("-t", 1)
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and waits on pidfds")


@pytest.fixture(scope="module")
def served(patched, target_path, drafter_gguf):
    with ServedCommand(target_path, drafter_gguf, *ALONE, "--server", patched.server) as server:
        yield server


def text_of_run(target, drafter, prompt):
    """What `dflash2 run` prints for `prompt`."""
    done = run("dflash2", "run", target, drafter, prompt, "-n", N_TOKENS, *ALONE)
    assert done.returncode == 0, done.stderr
    return done.stdout.removesuffix("\n")


def test_greedy_completions_are_the_text_of_dflash2_run(served, target_path, drafter_gguf, prompts):
    answer = served.client.completions.create(
        model="target-q8_0", prompt=prompts[0], max_tokens=N_TOKENS, temperature=0
    )
    assert answer.choices[0].text == text_of_run(target_path, drafter_gguf, prompts[0])
    assert answer.timings["draft_n_accepted"] > 10
    assert answer.timings["draft_n"] > answer.timings["draft_n_accepted"]


def test_greedy_chats_are_the_text_of_dflash2_run(served, target_path, drafter_gguf):
    messages = [{"role": "user", "content": "def read_lines(path):"}]
    prompt = served.client.post("/../apply-template", cast_to=object, body={"messages": messages})["prompt"]
    answer = served.client.chat.completions.create(
        model="target-q8_0", messages=messages, max_tokens=N_TOKENS, temperature=0
    )
    expected = text_of_run(target_path, drafter_gguf, prompt)
    assert len(expected) > 40
    assert answer.choices[0].message.content.strip() == expected.strip()


def test_what_it_prints_can_be_used(served, patched):
    ready, example, client = served.shown
    assert ready == f"ready at {served.url}: target-q8_0, by {patched.server} (as given)"
    answer = subprocess.run(example, shell=True, capture_output=True, text=True, check=True).stdout
    assert '"object":"chat.completion"' in answer
    made = eval(client, {"openai": openai})
    assert [model.id for model in made.models.list().data] == ["target-q8_0"]


def test_a_stock_server_on_path_is_used_where_nothing_is_built(target_path, drafter_gguf, prompts, tmp_path):
    stock = build(stock=True, targets=("server",)).server
    variables = {"DFLASH2_CACHE": str(tmp_path), "PATH": f"{stock.parent}:/bin:/usr/bin"}
    body = {"prompt": prompts[0], "max_tokens": N_TOKENS, "temperature": 0}
    with ServedCommand(target_path, drafter_gguf, *ALONE, **variables) as server:
        assert server.shown[0] == f"ready at {server.url}: target-q8_0, by {stock} (on PATH)"
        answer = server.client.completions.create(model="target-q8_0", **body)
    assert answer.choices[0].text == text_of_run(target_path, drafter_gguf, prompts[0])
    assert answer.timings["draft_n_accepted"] > 10


def test_a_server_that_others_reach_says_so(target_path, drafter_gguf):
    with ServedCommand(target_path, drafter_gguf, *ALONE, "--", "--host", "0.0.0.0") as server:
        port = server.url.rpartition(":")[2]
        assert server.url == f"http://127.0.0.1:{port}"
    assert f"Whoever reaches port {port} of this machine can use it; --api-key asks for a key." in server.said


def test_options_of_the_server_go_before_ours(target_path, drafter_gguf, prompts):
    options = ("--alias", "theirs", "--api-prefix", "/below", "--spec-draft-n-max", "2", "-c", "256")
    with ServedCommand(target_path, drafter_gguf, *ALONE, "--alias", "ours", "--", *options) as server:
        assert server.url.endswith("/below")
        assert [model.id for model in server.client.models.list().data] == ["theirs"]
        body = {"prompt": prompts[0], "max_tokens": N_TOKENS, "temperature": 0}
        answer = server.client.completions.create(model="theirs", **body)
        n_cycles = answer.timings["draft_n_cycles"]
        assert 0 < answer.timings["draft_n"] <= 2 * n_cycles
        slots = server.client.get("/../slots", cast_to=object)
        assert [slot["n_ctx"] for slot in slots] == [256]


def test_a_key_is_asked_for_and_shown_nowhere(target_path, drafter_gguf):
    key = "sk-not-to-be-seen"
    with ServedCommand(target_path, drafter_gguf, *ALONE, "-v", LLAMA_API_KEY=key) as server:
        with pytest.raises(openai.AuthenticationError) as refused:
            server.client.chat.completions.create(model="x", messages=[{"role": "user", "content": "hello"}])
        assert refused.value.status_code == 401
        known = server.client.with_options(api_key=key)
        body = {"prompt": "def f", "max_tokens": 4}
        assert known.completions.create(model="x", **body).choices[0].finish_reason == "length"
        assert '"Authorization: Bearer $LLAMA_API_KEY"' in server.shown[1]
        assert server.shown[2].endswith('api_key=os.environ["LLAMA_API_KEY"])')
        if sys.platform == "linux":
            assert key not in Path(f"/proc/{server.child}/cmdline").read_text()
    assert key not in server.said + "".join(server.shown)


@linux
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_ends_both(target_path, drafter_gguf, name):
    with ServedCommand(target_path, drafter_gguf, *ALONE) as server:
        child = os.pidfd_open(server.child)
        server.process.send_signal(getattr(signal, name))
        assert server.end() == 0
        assert ends(child)
    # It ends in order, or at once if it had not yet come to handle signals.
    assert server.said.splitlines()[-1] in (
        "llama-server has stopped: exit status 0",
        "llama-server has stopped: by SIGTERM",
    )
    os.close(child)


@linux
def test_the_server_does_not_outlive_a_killed_command(target_path, drafter_gguf):
    with ServedCommand(target_path, drafter_gguf, *ALONE) as server:
        child = os.pidfd_open(server.child)
        server.process.kill()
        assert server.end() == -signal.SIGKILL
        assert ends(child)
    os.close(child)


@linux
def test_a_killed_server_is_reported_with_advice_and_its_last_lines(target_path, drafter_gguf):
    with ServedCommand(target_path, drafter_gguf, *ALONE) as server:
        os.kill(server.child, signal.SIGKILL)
        assert server.end() == 1
    sentence, *last = server.said.partition("error: ")[2].splitlines()
    assert sentence.startswith("llama-server ended by itself (by SIGKILL). It was killed from outside")
    assert "--ctx-size" in sentence
    assert last[0] == "Its last lines:"
    assert f"listening on {server.url}" in last[-1]


def test_names_cannot_steer_the_terminal(target_path, drafter_gguf, tmp_path):
    target, drafter = tmp_path / "a\x1b[31m\u202e,b.gguf", tmp_path / "d\x1b]0;x\x07.gguf"
    target.symlink_to(target_path)
    drafter.symlink_to(drafter_gguf)
    with ServedCommand(target, drafter, *ALONE, "-v") as server:
        name = "a\\x1b[31m\\u202e_b"
        assert server.shown[0].startswith(f"ready at {server.url}: {name}, by ")
        assert [model.id for model in server.client.models.list().data] == [name]
        answer = subprocess.run(server.shown[1], shell=True, capture_output=True, text=True, check=True).stdout
        assert '"object":"chat.completion"' in answer
    for line in (*server.shown, *server.said.splitlines()):
        assert line.isprintable(), line


def test_python_serves_the_same_text(target_path, drafter_gguf, prompts):
    pytest.importorskip("sse_starlette", reason="needs the extra `server`")
    with ServedCommand(target_path, drafter_gguf, *ALONE, "--python", "--alias", "pair") as server:
        body = {"prompt": prompts[0], "max_tokens": N_TOKENS, "temperature": 0}
        # The server's own default penalises repetition.
        answer = server.client.completions.create(model="pair", extra_body={"repeat_penalty": 1.0}, **body)
        assert answer.choices[0].text == text_of_run(target_path, drafter_gguf, prompts[0])
        assert [model.id for model in server.client.models.list().data] == ["pair"]
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == 0
