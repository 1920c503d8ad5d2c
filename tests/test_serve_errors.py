"""`dflash2 serve` that cannot: one sentence that says why, exit status 1, nothing left running."""

import os
import socket

import pytest
from gguf_edit import edit_gguf
from test_cli import run
from test_server_probe import OLDER

from dflash2.errors import OptionError
from dflash2.modelfiles.serving import checked_key, rpc_endpoints

pytestmark = pytest.mark.usefixtures("patched")
# A server that drafts with the demo pair as it should, and ends when it is to serve.
DYING = """#!/bin/sh
case "$*" in
    *--alias*) echo '0.00.1 I srv: loading'
               printf '0.00.2 E srv: no \\033[31mmemory\\033[0m for \\302\\233x\\n'
               echo 'and so on'
               exit 3 ;;
    *) exec "{server}" "$@" ;;
esac
"""
# It was built without RPC.
WITHOUT_RPC = """#!/bin/sh
case "$*" in
    --rpc*) echo 'error while handling argument "--rpc": RPC not supported in this build'; exit 1 ;;
    *) exec "{server}" "$@" ;;
esac
"""


@pytest.fixture
def refused(target_path, drafter_gguf):
    """The one line of standard error with which a call is refused."""

    def call(*arguments, target=target_path, drafter=drafter_gguf, **options):
        done = run("dflash2", "serve", target, drafter, "--port", 0, *arguments, **options)
        assert done.returncode == 1, done.stderr
        assert done.stdout == ""
        lines = [line for line in done.stderr.splitlines() if not line.startswith("loading ")]
        assert len(lines) == 1, done.stderr
        assert lines[0].isprintable()
        return lines[0]

    return call


@pytest.fixture
def script(tmp_path):
    """Writes a program called llama-server."""

    def write(text):
        folder = tmp_path / "bin"
        folder.mkdir()
        path = folder / "llama-server"
        path.write_text(text)
        path.chmod(0o755)
        return path

    return write


@pytest.fixture
def nothing(tmp_path):
    """An environment with an empty cache, and a shell alone on its PATH."""
    folder = tmp_path / "path"
    folder.mkdir()
    return {**os.environ, "DFLASH2_CACHE": str(tmp_path / "cache"), "PATH": str(folder)}


def test_a_port_in_use(refused):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = f"error: port {port} of 127.0.0.1 is in use; choose another with --port, or --port 0 for a free one."
        assert refused("--port", port) == said
        assert refused("--", "--port", port) == said


def test_an_address_of_another_machine(refused):
    assert refused("--host", "192.0.2.7").startswith("error: no server can listen at 192.0.2.7:0: ")


def test_a_missing_model(refused, tmp_path):
    for name in ("target", "drafter"):
        missing = tmp_path / f"{name}.gguf"
        said = refused(**{name: missing})
        assert said.startswith(f"error: '{missing}' is no file or folder here")


def test_a_pair_that_does_not_fit(refused, drafter_gguf, tmp_path):
    other = edit_gguf(drafter_gguf, tmp_path / "other.gguf", metadata={"dflash.target_layers": [1, 3, 99]})
    said = refused(drafter=other)
    assert said.startswith(f"error: {other} does not work with ")
    assert "tap_range" in said


def test_more_drafts_than_the_block_has(refused):
    assert refused("--depth", 8) == "error: the drafter proposes 7 tokens at most, not 8; give --depth 1 to 7."


@pytest.mark.parametrize("alias", ["", "\x1b[31mred", "\u202eright to left", "two\nlines"])
def test_a_name_that_does_not_print(refused, alias):
    assert refused("--alias", alias).endswith(" is empty or does not print; give another name with --alias.")


def test_no_server_at_all(refused, nothing):
    assert refused(env=nothing) == (
        "error: there is no patched llama-server in the cache and none on PATH; "
        "`dflash2 build --targets libs,server` makes one."
    )


def test_a_server_on_path_from_before_dflash_2(refused, nothing, script):
    old = script(OLDER)
    assert refused(env={**nothing, "PATH": f"{old.parent}:/bin:/usr/bin"}) == (
        f"error: {old} (on PATH) cannot run DFlash 2 drafters: it does not load a DFlash 2 drafter: llama_model_load: "
        "error loading model: wrong number of tensors; expected 36, got 25; "
        "`dflash2 build --targets libs,server` makes one."
    )


def test_a_server_that_is_none(refused, tmp_path):
    path = tmp_path / "file"
    path.write_text("")
    assert refused("--server", path) == (
        f"error: {path} is no program that can be run; give the path of a llama-server."
    )


def test_a_server_that_dies_at_start_is_quoted_harmlessly(patched, refused, script):
    dying = script(DYING.format(server=patched.server))
    assert refused("--server", dying) == (
        "error: llama-server ended while it was starting (exit status 3): srv: no \\x1b[31mmemory\\x1b[0m for \\x9bx. "
        "For less memory, start it again with a smaller --ctx-size (-c), fewer --gpu-layers or a smaller quantisation."
    )


def test_an_option_that_the_server_does_not_know(refused):
    said = refused("--", "--nonsense")
    assert said == (
        "error: llama-server ended while it was starting (exit status 1): error: invalid argument: --nonsense."
    )


def test_rpc_needs_a_build_with_it(refused, nothing):
    assert refused("--rpc", "127.0.0.1:1", env=nothing).endswith(
        "error: there is no patched llama-server with RPC in the cache and none on PATH; "
        "`dflash2 build --targets libs,server,rpc` makes one."
    )


def test_rpc_needs_a_server_with_it(patched, refused, script):
    without = script(WITHOUT_RPC.format(server=patched.server))
    said = refused("--server", without, "--rpc", "127.0.0.1:1")
    assert said == f"error: {without} (as given) was built without RPC."


def test_what_sets_the_drafter_aside_is_noted_before_anything_is_loaded(tmp_path):
    done = run("dflash2", "serve", tmp_path / "none.gguf", tmp_path / "none", "--", "--spec-draft-n-max", "0")
    assert done.returncode == 1
    assert done.stderr.startswith("note: --spec-draft-n-max 0 turns drafting off; ")


def test_one_rpc_server_under_two_names(refused):
    assert refused("--rpc", "127.0.0.1:50052,localhost:50052") == (
        "error: 127.0.0.1:50052 and localhost:50052 are the same RPC server, which can be used once; leave one out."
    )


def test_rpc_of_another_machine_needs_a_flag(refused):
    assert refused("--rpc", "localhost:1,192.0.2.7:50052").startswith(
        "error: 192.0.2.7:50052 is another machine, and llama.cpp's RPC has no authentication"
    )


@pytest.mark.parametrize("text", ["", "host", "host:", ":1", "a:1,", "a:x", "a\x1b:1"])
def test_what_is_no_endpoint_is_named(text):
    with pytest.raises(OptionError, match="is named by host:port"):
        rpc_endpoints(text)


@pytest.mark.parametrize("key", ["", "two words", "a,b", 'a"b', "a\nb", "schlüssel"])
def test_a_key_that_no_header_can_carry_is_refused_unshown(key):
    with pytest.raises(OptionError) as refused:
        checked_key(key)
    assert not key or key not in str(refused.value)


def test_python_takes_no_options_of_llama_server(target_path, drafter_gguf):
    done = run("dflash2", "serve", target_path, drafter_gguf, "--python", "--", "--metrics")
    assert done.returncode == 2
    assert "--python takes neither" in done.stderr
