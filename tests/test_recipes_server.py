"""The llama.cpp recipe against the real llama-server."""

import re
import shlex
import subprocess

from llama_server import LlamaServer

from dflash2.modelfiles import launch, pair_names, recipe


def test_server_starts_with_the_command_and_drafts_seven(patched, target_path, drafter_gguf, tmp_path):
    found = launch(recipe("llama.cpp"), pair_names(str(target_path), str(drafter_gguf)))
    program, *arguments = shlex.split(found.script.replace("\\\n", ""))
    assert program == "llama-server"
    with LlamaServer(patched.server, arguments, tmp_path / "server.log") as server:
        done = server.complete(list(range(10, 40)), 32)
    assert len(done.tokens) == 32
    assert max(drafted for drafted, _ in done.cycles) == 7


def test_server_knows_every_option_of_the_command(patched):
    """The published pair comes from the Hub, which is not asked here: its options are in the server's own help."""
    text = subprocess.run([patched.server, "--help"], capture_output=True, text=True, check=True).stdout
    known = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", text))
    found = launch(recipe("llama.cpp"), pair_names("qwen3.8-27b"))
    options = {argument for argument in found.steps[-1].argv if argument.startswith("-")}
    assert options == {"-hf", "-hfd", "--spec-type", "--spec-draft-n-max", "-np"}
    assert options | {"--rpc"} <= known
    assert "draft-dflash" in text
