"""What `llama-server` is started with, for pairs, machines and wishes that the tests of the live server do not have."""

from itertools import pairwise
from pathlib import Path

import pytest

from dflash2.errors import ServerError
from dflash2.gguf_info import read_gguf_info
from dflash2.modelfiles import ModelFile, Pair
from dflash2.modelfiles.llama_server import ServerProgram
from dflash2.modelfiles.server_process import ServerProcess, StopRequest
from dflash2.modelfiles.serving import Address, ServeOptions, command_line, is_loopback, undone_by

PATCHED = ServerProgram(Path("/bin/llama-server"), "patched build, cuda", patched=True, couples=True, fits=True)
STOCK = ServerProgram(Path("/bin/llama-server"), "on PATH", patched=False, couples=False, fits=False)
HERE = Address("127.0.0.1", 8080)


@pytest.fixture
def pair(target_path, drafter_gguf):
    return Pair(ModelFile(target_path, "target"), ModelFile(drafter_gguf, "drafter"), block_size=8)


def started(pair, options, program=PATCHED):
    """The values of the command line's options, the last of each; and all of it."""
    command = command_line(pair, options, program, HERE)
    return dict(pairwise(command)), command


def test_by_default_the_whole_block_is_drafted_and_memory_is_kept_for_the_drafter(pair, target_path, drafter_gguf):
    values, command = started(pair, ServeOptions())
    assert values["--model"] == str(target_path)
    assert values["--spec-draft-model"] == str(drafter_gguf)
    assert (values["--spec-type"], values["--spec-draft-n-max"]) == ("draft-dflash", "7")
    assert (values["--spec-draft-verify"], values["--flash-attn"], values["--parallel"]) == ("coupled", "on", "1")
    trained = read_gguf_info(target_path).metadata["qwen3.context_length"]
    assert values["--ctx-size"] == str(trained)
    mib = drafter_gguf.stat().st_size / 2**20
    assert 1024 + mib <= int(values["--fit-target"]) < 1025 + mib
    assert not {"--threads", "--gpu-layers", "--rpc"} & set(command)


def test_an_older_server_gets_no_option_that_it_lacks(pair):
    assert not {"--spec-draft-verify", "--fit-target"} & set(started(pair, ServeOptions(), STOCK)[1])


@pytest.mark.parametrize(("wish", "said"), [(-1, "all"), (0, "0"), (20, "20")])
def test_layers_are_those_of_both_models(pair, wish, said):
    values, command = started(pair, ServeOptions(gpu_layers=wish))
    assert (values["--gpu-layers"], values["--spec-draft-ngl"]) == (said, said)
    assert "--fit-target" not in command


def test_every_request_has_the_context_that_is_asked_for(pair):
    values, _ = started(pair, ServeOptions(ctx_size=1000, parallel=3))
    assert (values["--ctx-size"], values["--parallel"]) == ("3000", "3")


def test_one_type_is_that_of_all_caches(pair):
    values, _ = started(pair, ServeOptions(cache_type="q8_0", threads=5, depth=3))
    caches = {value for name, value in values.items() if name.startswith(("--cache-type", "--spec-draft-type"))}
    assert caches == {"q8_0"}
    assert (values["--threads"], values["--spec-draft-n-max"]) == ("5", "3")


def test_servers_of_devices_come_before_all_that_names_devices(pair):
    _, command = started(pair, ServeOptions(rpc=("a:1", "b:2"), forwarded=("--device", "RPC0")))
    assert command[1:3] == ["--rpc", "a:1,b:2"]
    assert command[-2:] == ["--device", "RPC0"]


@pytest.mark.parametrize(
    ("forwarded", "said"),
    [
        (("--spec-type", "none"), "--spec-type none can turn DFlash drafting off"),
        (("--spec-type", "draft-dflash,ngram-mod"), "--spec-type draft-dflash,ngram-mod can turn DFlash"),
        (("--spec-draft-n-max", "0"), "--spec-draft-n-max 0 turns drafting off"),
        (("-m", "other.gguf"), "-m other.gguf replaces the target"),
        (("--threads", "2", "-md", "a\x1b.gguf"), "-md a"),
        (("-hfd", "a/b"), "-hfd a/b replaces the drafter"),
    ],
)
def test_forwarded_options_that_set_the_pair_or_its_drafting_aside_are_named(forwarded, said):
    (sentence,) = undone_by(forwarded)
    assert sentence.startswith(said)
    assert sentence.isprintable()


def test_other_forwarded_options_pass_in_silence():
    kept = ("--spec-draft-n-max", "10", "--spec-type", "draft-dflash", "--mlock", "-c", "4096", "--port", "0")
    assert undone_by(kept) == undone_by(()) == ()


@pytest.mark.parametrize(
    ("hosts", "private", "url"),
    [
        ("127.0.0.1", True, "http://127.0.0.1:1"),
        ("localhost", True, "http://localhost:1"),
        ("::1", True, "http://[::1]:1"),
        ("0.0.0.0", False, "http://127.0.0.1:1"),
        ("::", False, "http://[::1]:1"),
        ("127.0.0.1,192.0.2.7", False, "http://127.0.0.1:1"),
    ],
)
def test_an_address_says_who_reaches_it_and_how_we_do(hosts, private, url):
    address = Address(hosts, 1)
    assert (address.is_private, address.url) == (private, url)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("kill -9 $$", "(by SIGKILL): killed from outside, mostly for lack of memory. "),
        ("echo '0.00.1 E ggml: failed to allocate buffer'; exit 1", "ggml: failed to allocate buffer. "),
    ],
)
def test_a_server_that_runs_out_of_memory_while_it_loads_is_told_what_to_lower(script, said):
    with (
        ServerProcess(["/bin/sh", "-c", script], stop=StopRequest()) as process,
        pytest.raises(ServerError) as caught,
    ):
        process.wait_until_ready(Address("127.0.0.1", 1))
    assert f"{said}For less memory, start it again with a smaller --ctx-size (-c), " in str(caught.value)


def test_a_server_that_fails_otherwise_is_not_told_to_save_memory():
    script = "echo 'error: invalid argument: --nope'; exit 1"
    with (
        ServerProcess(["/bin/sh", "-c", script], stop=StopRequest()) as process,
        pytest.raises(ServerError, match=r"\(exit status 1\): error: invalid argument: --nope\.$"),
    ):
        process.wait_until_ready(Address("127.0.0.1", 1))


@pytest.mark.parametrize(
    ("host", "loopback"), [("127.9.9.9", True), ("10.0.0.1", False), ("localhost.evil.example", False)]
)
def test_only_this_machine_is_loopback(host, loopback):
    assert is_loopback(host) == loopback
