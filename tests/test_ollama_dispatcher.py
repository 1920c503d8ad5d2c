"""The script in the place of Ollama's llama-server: who is started, and with what."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from fake_ollama import started, witness

from dflash2.modelfiles.runner.dispatcher import dispatcher, is_dispatcher

SHELLS = {
    "sh": ["/bin/sh"],
    "dash": ["dash"],
    "bash": ["bash", "--posix"],
    "busybox": ["busybox", "sh"],
    "mksh": ["mksh"],
}
ODD_WORDS = [
    b"",
    b"two words",
    b"line\nbreak\n",
    b"'single' \"double\" `back` $(touch /tmp/dflash2-was-here) ${HOME} $$ \\ \\n \\\\",
    b"*",
    b"-n",
    b"--",
    b"!",
    b"(",
    "größer 模型 🦙".encode(),
    b"no utf-8: \xff\xfe",
    b"\t\r\x1b[31m",
    b"",
]
DRAFTING = (["--spec-type", "draft-dflash"], ["--spec-type=draft-dflash"], ["--spec-type", "ngram-mod,draft-dflash"])
NOT_DRAFTING = (
    [],
    ["--spec-type"],
    ["--spec-type", "none"],
    ["--spec-type", "draft-mtp"],
    ["--spec-type", "draft-dflash2"],
    ["--spec-type=xdraft-dflash"],
    ["--spec-type", "", "draft-dflash"],
    ["draft-dflash"],
    ["--model", "draft-dflash"],
    ["--spec-types", "draft-dflash"],
    ["--list-devices"],
)


@pytest.fixture(params=SHELLS)
def shell(request):
    name, *options = SHELLS[request.param]
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"no {request.param} here")
    return [path, *options]


def put(folder: Path) -> Path:
    """A dispatcher between two witnesses in `folder`, which is made."""
    ollama, ours = folder / "ollama", folder / "ours"
    ollama.mkdir(parents=True)
    ours.mkdir()
    original, server = witness(ollama / "llama-server.ollama", "original"), witness(ours / "llama-server", "server")
    program = ollama / "llama-server"
    program.write_bytes(dispatcher(program, original, server))
    program.chmod(0o755)
    return program


@pytest.mark.parametrize("words", NOT_DRAFTING, ids=" ".join)
def test_everything_but_dflash_drafting_is_the_originals(tmp_path, shell, words):
    told = started(*shell, put(tmp_path), *words)
    assert (told.who, told.arguments, told.status, told.errors) == ("original", [w.encode() for w in words], 7, "")
    assert told.same_process


@pytest.mark.parametrize("words", DRAFTING, ids=" ".join)
def test_dflash_drafting_is_the_servers(tmp_path, shell, words):
    told = started(*shell, put(tmp_path), "--model", "a b", *words, "-c", "4096")
    assert (told.who, told.status, told.errors) == ("server", 7, "")
    assert told.arguments == [word.encode() for word in ("--model", "a b", *words, "-c", "4096")]
    assert told.same_process


@pytest.mark.parametrize("drafting", [[], [b"--spec-type", b"draft-dflash"]], ids=["original", "server"])
def test_odd_arguments_arrive_as_they_were(tmp_path, shell, drafting):
    words = [*ODD_WORDS, *drafting, *ODD_WORDS]
    assert started(*shell, put(tmp_path), *words).arguments == words
    assert not Path("/tmp/dflash2-was-here").exists()


@pytest.mark.parametrize(
    "name", ["plain", "two words", 'it\'s "odd"', "$HOME `x` \\", "line\nbreak", "-n", "*?[a]", "größer 模型", "a:b"]
)
def test_odd_folders_are_only_names(tmp_path, shell, name):
    program = put(tmp_path / name)
    assert started(*shell, program).who == "original"
    told = started(*shell, program, *DRAFTING[0], env={"LD_LIBRARY_PATH": f"{program.parent}:/mine"})
    assert told.who == "server"
    if ":" not in name:
        assert told.environment[b"LD_LIBRARY_PATH"] == os.fsencode(f"{tmp_path / name / 'ours'}:/mine")


def test_the_original_gets_the_environment_as_it_was(tmp_path):
    """All but what a shell may add of its own."""
    given = {
        "PATH": "/usr/bin:/bin",
        "HOME": "/nowhere",
        "LD_LIBRARY_PATH": f"{tmp_path}/ollama::/usr/lib",
        "GGML_BACKEND_PATH": "/x/libggml-cuda.so",
        "ENV": "/no/such/file",
        "previous": "mine",
        "words": "a\nb 模型",
        "EMPTY": "",
    }
    told = started(put(tmp_path), "-c", "1", env=given)
    added = {b"PWD", b"OLDPWD", b"SHLVL", b"_", b"LC_CTYPE"}
    assert {name: value for name, value in told.environment.items() if name not in added} == {
        name.encode(): value.encode() for name, value in given.items()
    }


def test_the_server_gets_an_environment_without_ollamas_libraries(tmp_path, shell):
    ollama = tmp_path / "ollama"
    program = put(tmp_path)
    linked = tmp_path / "linked"
    linked.symlink_to(ollama)
    given = {
        "LD_LIBRARY_PATH": f"{ollama}:{ollama}/cuda_v13::{ollama}/:/opt/cuda/lib64:{ollama}-mine:/a b",
        "DYLD_LIBRARY_PATH": str(ollama),
        "PATH": f"{ollama}:/usr/bin:/bin:/home/x/bin *",
        "GGML_BACKEND_PATH": f"{ollama}/cuda_v13/libggml-cuda.so",
        "CUDA_VISIBLE_DEVICES": "1",
    }
    told = started(*shell, program, "--spec-type", "draft-dflash", env=given).environment
    ours = tmp_path / "ours"
    assert told[b"LD_LIBRARY_PATH"].decode() == f"{ours}:/opt/cuda/lib64:{ollama}-mine:/a b"
    assert told[b"DYLD_LIBRARY_PATH"].decode() == str(ours)
    assert told[b"PATH"].decode() == "/usr/bin:/bin:/home/x/bin *"
    assert told[b"CUDA_VISIBLE_DEVICES"] == b"1"
    assert b"GGML_BACKEND_PATH" not in told


def test_ollamas_folder_is_known_by_the_name_of_a_link_too(tmp_path):
    real = put(tmp_path / "real").parent
    linked = tmp_path / "linked"
    linked.symlink_to(real)
    server = real.parent / "ours" / "llama-server"
    program = linked / "llama-server"
    program.write_bytes(dispatcher(program, linked / "llama-server.ollama", server))
    told = started(program, *DRAFTING[0], env={"LD_LIBRARY_PATH": f"{real}/cuda:{linked}:/mine"})
    assert told.environment[b"LD_LIBRARY_PATH"].decode() == f"{server.parent}:/mine"


def test_a_signal_ends_it_as_it_ends_the_program(tmp_path, shell):
    for words in ([], DRAFTING[0]):
        assert started(*shell, put(tmp_path / str(len(words))), *words, "--die").status == -15


def test_without_its_server_it_says_so_and_runs_the_original(tmp_path, shell):
    program = put(tmp_path)
    server = tmp_path / "ours" / "llama-server"
    server.unlink()
    told = started(*shell, program, *DRAFTING[0], "x y")
    assert (told.who, told.arguments) == ("original", [b"--spec-type", b"draft-dflash", b"x y"])
    assert told.errors == (
        f"dflash2: {server} is gone, so Ollama's own llama-server runs, which may not know this drafter; "
        "'dflash2 ollama runner install' puts it back.\n"
    )


def test_without_the_original_it_fails_in_one_line(tmp_path, shell):
    program = put(tmp_path)
    original = program.with_name("llama-server.ollama")
    original.unlink()
    result = subprocess.run([*shell, program, "-c", "1"], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (127, "")
    assert result.stderr == f"dflash2: Ollama's own llama-server, {original}, is gone: install Ollama again.\n"


def test_an_original_put_back_while_it_starts_is_run_where_it_is_now(tmp_path, shell):
    program = put(tmp_path)
    running = program.rename(tmp_path / "as-it-was-read")
    program.with_name("llama-server.ollama").rename(program)
    told = started(*shell, running, "-c", "1 2")
    assert (told.who, told.arguments, told.errors) == ("original", [b"-c", b"1 2"], "")


def test_a_dispatcher_is_known_by_its_beginning(tmp_path):
    program = put(tmp_path)
    assert is_dispatcher(program)
    assert not is_dispatcher(program.with_name("llama-server.ollama"))
    assert not is_dispatcher(tmp_path)
    assert not is_dispatcher(tmp_path / "none")
