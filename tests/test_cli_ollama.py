"""`dflash2 ollama create` and `status` as a user runs them: real processes, their output and exit status."""

import json
import os
import pty
import signal
import subprocess
import threading
from pathlib import Path

import httpx
import pytest
from factories import make_drafter, make_target
from ollama_server import Model, digest_of
from test_cli import BIN, assert_one_sentence, run

from dflash2.converter import convert

STEERING = "\x1b]0;owned\x07\x1b[2J\u202e\x9b31m"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    target = make_target(folder / "target.gguf")
    return target, convert(make_drafter(folder / "drafter"), target, folder / "drafter.gguf").output


@pytest.fixture
def environment(ollama, tmp_path):
    kept = {key: value for key, value in os.environ.items() if not key.startswith("OLLAMA")}
    return {**kept, "OLLAMA_HOST": ollama.host, "DFLASH2_CACHE": str(tmp_path / "cache")}


def digest(path: Path) -> str:
    return digest_of(path.read_bytes())


def create(environment, *arguments):
    return run("dflash2", "ollama", "create", *arguments, env=environment)


def test_create_says_what_was_sent_and_that_the_draft_is_attached(ollama, environment, files):
    target, drafter = files
    result = create(environment, "fast", target, drafter)
    assert (result.returncode, result.stderr) == (0, "")
    size = (target.stat().st_size + drafter.stat().st_size) / 1e6
    assert result.stdout == (
        f"fast: the draft is attached ({digest(drafter)}), 3 draft tokens; sent {size:.1f} MB, 0.0 MB were there\n"
    )
    again = create(environment, "fast", target, drafter, "--json", "--host", ollama.host)
    found = json.loads(again.stdout)
    assert (found["schema"], found["name"], found["draft"]) == ("dflash2.ollama-create/1", "fast", digest(drafter))
    assert (found["sent_bytes"], found["draft_num_predict"], found["version"]) == (0, 3, "0.40.0")
    assert ollama.uploads() == [digest(drafter), digest(target)]


def test_options_become_fields_of_the_request(ollama, environment, files):
    options = ["--draft-num-predict", 2, "--template", "{{ .Prompt }}", "--system", "Be brief.", "--license", "MIT"]
    options += [
        "--parameter",
        "num_ctx=4096",
        "--parameter",
        "stop=a=b",
        "--parameter",
        "stop= ",
        "--renderer",
        "qwen3",
    ]
    options += [
        "--quantize",
        "q4_k_m",
        "--draft-quantize",
        "Q8_0",
        "--license",
        "Other",
        "--parser",
        "qwen3",
        "--message",
        "user",
        "Hi",
    ]
    assert create(environment, "fast", *files, *options).returncode == 0
    request = ollama.created[0]
    assert request["parameters"] == {"draft_num_predict": 2, "num_ctx": 4096, "stop": ["a=b", " "]}
    assert (request["template"], request["system"]) == ("{{ .Prompt }}", "Be brief.")
    assert (request["license"], request["renderer"], request["parser"]) == (["MIT", "Other"], "qwen3", "qwen3")
    assert request["messages"] == [{"role": "user", "content": "Hi"}]
    assert (request["quantize"], request["draft_quantize"]) == ("Q4_K_M", "Q8_0")


def test_options_go_before_those_of_a_modelfile(ollama, environment, files, tmp_path):
    target, drafter = files
    modelfile = tmp_path / "Modelfile"
    modelfile.write_text(f"FROM {target}\nDRAFT {drafter}\nPARAMETER num_ctx 1\nPARAMETER seed 5\nSYSTEM no\n")
    result = create(environment, "fast", "-f", modelfile, "--parameter", "num_ctx=2", "--system", "yes")
    assert result.returncode == 0, result.stderr
    assert ollama.created[0]["parameters"] == {"draft_num_predict": 3, "num_ctx": 2, "seed": 5}
    assert ollama.created[0]["system"] == "yes"


def test_a_target_of_the_server_is_named(ollama, environment, files):
    ollama.models["qwen3.8:27b"] = Model("sha256:" + "5" * 64)
    result = create(environment, "fast", "ollama:qwen3.8:27b", files[1])
    assert result.returncode == 0, result.stderr
    assert (ollama.created[0]["from"], "files" in ollama.created[0]) == ("qwen3.8:27b", False)
    assert ollama.uploads() == [digest(files[1])]


def test_a_pair_that_does_not_fit_is_refused_before_anything_is_sent(ollama, environment, files, tmp_path):
    other = make_target(tmp_path / "other.gguf", hidden=128)
    assert_one_sentence(create(environment, "fast", other, files[1]), "use the target the drafter was trained for")
    modelfile = tmp_path / "Modelfile"
    modelfile.write_text(f"FROM {other}\nDRAFT {files[1]}\n")
    assert_one_sentence(create(environment, "fast", "-f", modelfile), "use the target the drafter was trained for")
    assert ollama.uploads() == []
    assert create(environment, "fast", other, files[1], "--no-check").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["fast"], "Give either TARGET and DRAFTER, or a Modelfile with -f."),
        (["fast", "t.gguf", "d.gguf", "-f", "Modelfile"], "Give either TARGET"),
        (["fast", "ollama:base"], "needs a DRAFTER that is a GGUF file"),
        (["fast", "ollama:base", "d.gguf", "--revision", "main"], "and no revision"),
        (["fast", "t.gguf", "d.gguf", "--parameter", "num_ctx"], "is not NAME=VALUE"),
        (["fast", "t.gguf", "d.gguf", "--parameter", "draft_num_predict=2"], "as --draft-num-predict"),
        (["fast", "t.gguf", "d.gguf", "--draft-num-predict", "0"], "0 is not in the range x>=1"),
    ],
    ids=range(7),
)
def test_wrong_command_lines_are_usage_errors(ollama, environment, arguments, says):
    result = create(environment, *arguments)
    assert result.returncode == 2
    assert says in " ".join(result.stderr.replace("│", " ").split())
    assert ollama.created == []


def without_drafts(ollama):
    ollama.knows_drafts = False


def with_a_full_disk(ollama):
    ollama.disk_bytes = 0


def with_broken_lines(ollama):
    ollama.broken_for_good = True


def with_other_bytes(ollama):
    ollama.corrupts = True


def with_garbage(ollama):
    ollama.reports = [b'{"status": "parsing GGUF"}\n', b"\x1b[31mgarbage\n"]


def with_an_error_that_steers(ollama):
    ollama.reports = [json.dumps({"error": f"bad {STEERING} name"}).encode()]


def with_a_page(ollama):
    ollama.answers["/api/version"] = (200, "text/html", b"<html>\x1b[31m</html>")


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (without_drafts, "was made, but without its draft"),
        (with_a_full_disk, "no space left on device (status 500); make room where the server keeps its models"),
        (with_broken_lines, "broke 4 times while"),
        (with_other_bytes, "got other bytes than"),
        (with_garbage, "does not speak as Ollama does"),
        (with_an_error_that_steers, r"bad \x1b]0;owned\x07\x1b[2J\u202e\x9b31m name"),
        (with_a_page, "does not speak as Ollama does"),
    ],
)
def test_what_goes_wrong_on_the_server_is_one_sentence(ollama, environment, files, spoil, says):
    spoil(ollama)
    assert_one_sentence(create(environment, "fast", *files), says)


def test_no_server_is_found_out_before_anything_is_read(environment, tmp_path):
    result = create({**environment, "OLLAMA_HOST": "127.0.0.1:1"}, "fast", tmp_path / "gone.gguf", tmp_path / "gone")
    assert_one_sentence(result, "No Ollama answers at http://127.0.0.1:1; start it with `ollama serve`")
    assert_one_sentence(create(environment, "fast", "--host", "ftp://x", "t", "d"), "is no address of a server")
    refused = create(environment, "fast", "t", "d", "--parameter", "num_ctx=many")
    assert_one_sentence(refused, "invalid int value [many]")


def test_an_old_ollama_is_told_of_the_runner(ollama, environment, files):
    ollama.version = "0.33.0-rc2"
    result = create(environment, "fast", *files)
    assert result.returncode == 0
    assert result.stderr.startswith("note: the llama.cpp of Ollama 0.33.0-rc2 is older than DFlash 2; `dflash2 ollama")


def test_an_interrupt_ends_it_and_the_next_run_sends_only_what_is_missing(ollama, environment, files):
    target, drafter = files
    interrupted, go_on = threading.Event(), threading.Event()

    def interrupt():
        if len(ollama.uploads()) == 2 and not interrupted.is_set():
            interrupted.set()
            process.send_signal(signal.SIGINT)
            go_on.wait(30)

    ollama.on_upload = interrupt
    ollama.cuts = [None, 0]  # of a file this small, all is under way when the interrupt comes
    command = [BIN / "dflash2", "ollama", "create", "fast", target, drafter]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    out, err = process.communicate(timeout=60)
    go_on.set()
    assert interrupted.is_set()
    assert (process.returncode, out, err) == (130, "", "\naborted\n")
    assert create(environment, "fast", target, drafter).returncode == 0
    assert ollama.uploads() == [digest(drafter), digest(target), digest(target)]


def test_progress_on_a_terminal_cannot_be_steered_by_the_server(ollama, environment, files):
    steps = [{"status": f"pulling {STEERING} [bold]x[/bold]", "total": 100, "completed": done} for done in (1, 100)]
    ollama.reports = [*(json.dumps(step).encode() + b"\n" for step in steps), b'{"error": "over"}\n']
    leader, follower = pty.openpty()
    command = [BIN / "dflash2", "ollama", "create", "fast", *files]
    environment = {**environment, "COLUMNS": "200", "TERM": "xterm"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=follower)
    os.close(follower)
    shown = b""
    try:
        while chunk := os.read(leader, 65536):
            shown += chunk
    except OSError:  # as Linux says that the other side is closed
        pass
    os.close(leader)
    process.communicate(timeout=60)
    assert process.returncode == 1
    text = shown.decode()
    assert r"pulling \x1b]0;owned\x07\x1b[2J\u202e\x9b31m [bold]x[/bold]" in text
    assert not any(part in text for part in ("\x1b]0;", "\x1b[2J", "\u202e", "\x9b"))


def test_status_as_lines_and_as_json(ollama, environment):
    base, draft = "sha256:" + "0" * 64, "sha256:" + "a" * 64
    ollama.version = "0.33.0-rc2"
    ollama.models = {"fast:latest": Model(base, draft, {"draft_num_predict": 7}), "plain:latest": Model(base)}
    ollama.running = ["fast:latest"]
    environment = {**environment, "PATH": "/nowhere"}
    result = run("dflash2", "ollama", "status", env=environment)
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0] == f"Ollama 0.33.0-rc2 at http://{ollama.host}"
    assert lines[1].startswith("its llama.cpp knows DFlash 2: no (releases up to 0.33.0-rc2 have")
    assert "dflash2 ollama runner install" in lines[2]
    assert lines[3] == f"fast:latest: loaded, draft {draft}, 7 draft tokens"
    assert lines[4] == "  drafting: unknown (no llama-server process of it can be seen)"
    assert lines[6].startswith("  plain:latest has the same base and no draft")
    found = json.loads(run("dflash2", "ollama", "status", "plain", "--json", env=environment).stdout)
    assert (found["schema"], found["knows_dflash2"]) == ("dflash2.ollama-status/1", False)
    assert (found["models"][0]["engaged"], found["models"][0]["draft"]) == ("no", None)


def test_status_of_nothing_loaded_and_of_no_server(environment):
    result = run("dflash2", "ollama", "status", env={**environment, "PATH": "/nowhere"})
    assert result.stdout.splitlines()[-1] == "no model is loaded"
    down = run("dflash2", "ollama", "status", "--host", "127.0.0.1:1", env=environment)
    assert_one_sentence(down, "No Ollama answers at http://127.0.0.1:1")
    assert_one_sentence(run("dflash2", "ollama", "status", "gone", env=environment), "model 'gone:latest' not found")


def test_names_that_steer_a_terminal_are_escaped(ollama, environment):
    name = f"x{STEERING}:latest"
    ollama.version = f"1.0{STEERING}"
    ollama.models[name] = Model("sha256:" + "0" * 64)
    ollama.running = [name]
    result = run("dflash2", "ollama", "status", env={**environment, "PATH": "/nowhere"})
    assert result.returncode == 0
    assert not any(character in result.stdout for character in STEERING if not character.isprintable())
    assert r"x\x1b]0;owned" in result.stdout


def test_status_runs_the_server_that_drafts(environment, patched, tmp_path):
    """An Ollama of this machine, whose own llama-server is one that knows DFlash 2."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "ollama"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    folder = tmp_path / "lib" / "ollama"
    folder.mkdir(parents=True)
    (folder / "llama-server").symlink_to(patched.server)
    environment = {**environment, "PATH": f"{program.parent}:{os.environ['PATH']}"}
    found = json.loads(run("dflash2", "ollama", "status", "--json", env=environment).stdout)
    assert (found["knows_dflash2"], found["advice"]) == (True, [])
    assert found["because"] == f"{folder / 'llama-server'} drafted with a DFlash 2 drafter"


def real_ollama() -> str | None:
    """Address of a real Ollama on loopback."""
    try:
        answer = httpx.get("http://127.0.0.1:11434/api/version", timeout=2, trust_env=False)
        return "127.0.0.1:11434" if "version" in answer.json() else None
    except (httpx.HTTPError, ValueError, TypeError):
        return None


@pytest.mark.skipif(real_ollama() is None, reason="no Ollama answers on loopback")
def test_a_real_ollama_gets_the_demo_pair(demo, drafter_gguf):
    name, host = "dflash2-live-test", real_ollama()
    try:
        made = run("dflash2", "ollama", "create", name, demo.target, drafter_gguf, "--host", host, "--json")
        assert made.returncode == 0, made.stderr
        assert json.loads(made.stdout)["draft"] == digest(drafter_gguf)
        found = json.loads(run("dflash2", "ollama", "status", name, "--host", host, "--json").stdout)
        assert found["models"][0]["draft"] == digest(drafter_gguf)
        assert found["models"][0]["draft_num_predict"] == 7
    finally:
        httpx.request("DELETE", f"http://{host}/api/delete", json={"model": name}, trust_env=False)


@pytest.mark.parametrize(
    "odd",
    [
        {"OLLAMA_HOST": "::1"},
        {"OLLAMA_HOST": "127.0.0.1:99999"},
        {"OLLAMA_HOST": "http://[::1", "all_proxy": "socks5://127.0.0.1:1", "HTTP_PROXY": "foo:bar"},
        {"OLLAMA_HOST": '"quoted"', "http_proxy": "http://[::1", "no_proxy": "[::1,http://["},
    ],
    ids=str,
)
def test_a_good_host_is_used_whatever_the_environment_names(ollama, environment, odd):
    result = run("dflash2", "ollama", "status", "--host", ollama.host, env=environment | odd)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith(f"Ollama 0.40.0 at http://{ollama.host}\n")


@pytest.mark.parametrize(
    ("odd", "says"),
    [
        ({"OLLAMA_HOST": "127.0.0.1:99999"}, "127.0.0.1:99999 is no address of a server"),
        ({"OLLAMA_HOST": "http://[::1"}, "http://[::1 is no address of a server"),
        ({"OLLAMA_HOST": "10.0.0.7", "http_proxy": "foo:bar"}, "The proxy that the environment names"),
        ({"OLLAMA_HOST": "10.0.0.7", "no_proxy": "", "all_proxy": "socks5://127.0.0.1:1"}, "The proxy that the"),
        ({"SSL_CERT_FILE": "/nowhere/certificates.pem"}, "SSL_CERT_FILE or SSL_CERT_DIR"),
        ({"OLLAMA_API_KEY": "k\u00e9y"}, "OLLAMA_API_KEY has characters that no key has"),
    ],
    ids=str,
)
def test_an_odd_environment_is_said_in_one_sentence(environment, odd, says):
    assert_one_sentence(run("dflash2", "ollama", "status", env=environment | odd), says)
