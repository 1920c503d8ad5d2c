"""Whether a `llama-server` knows DFlash 2, asked of real programs and of what else may lie in their place."""

import os
import shutil
from pathlib import Path

import pytest

from dflash2.modelfiles.server_probe import probe_server
from dflash2.patches import build

# Answers as llama.cpp b10488 does: it knows DFlash, and counts the tensors of a DFlash 2 drafter wrong.
OLDER = """#!/bin/sh
case "$*" in
    --version) echo 'version: 10488 (deadbeef)' ;;
    *--list-devices) printf 'Available devices:\\n  CUDA0: NVIDIA X (1024 MiB, 1000 MiB free)\\n' ;;
    *) echo '0.00.1 I srv: loading model'
       echo '0.00.2 E llama_model_load: error loading model: wrong number of tensors; expected 60, got 58'
       echo '0.00.3 E srv: exiting due to model loading error'
       exit 1 ;;
esac
"""


@pytest.fixture
def program(tmp_path):
    """Writes a script that stands where a server is looked for."""

    def write(text: str) -> Path:
        path = tmp_path / "llama-server"
        path.write_text(text)
        path.chmod(0o755)
        return path

    return write


@pytest.mark.parametrize("stock", [True, False], ids=["stock", "patched"])
def test_a_server_that_drafts_with_dflash_2_is_known_by_doing_it(stock):
    made = build(stock=True, targets=("server",)) if stock else build(targets=("libs", "server"))
    probe = probe_server(made.server, [("--no-webui",), ("-c", "512")])
    assert (probe.dflash2, probe.reason, probe.missing) == (True, "", ())
    assert probe.program == made.server
    assert probe.version.startswith("0.5.0-dev (build 0, commit ")


def test_variables_for_other_runs_do_not_come_in(patched):
    other = {"LLAMA_API_KEY": "secret", "LLAMA_ARG_MODEL": "/no/model.gguf", "LLAMA_ARG_SPEC_TYPE": "none"}
    assert probe_server(patched.server, environment={**os.environ, **other}).dflash2


def test_every_option_that_is_not_known_is_named(patched):
    probe = probe_server(patched.server, [("--brand-new", "1"), ("--offline",), ("-zz",)])
    assert probe.missing == ("--brand-new", "-zz")
    assert (probe.dflash2, probe.reason) == (False, "does not know --brand-new, -zz")


def test_a_server_from_before_dflash_2_says_why_it_does_not_load_the_drafter(program):
    probe = probe_server(program(OLDER))
    assert (probe.version, probe.dflash2) == ("10488 (deadbeef)", False)
    assert probe.devices == ("CUDA0: NVIDIA X (1024 MiB, 1000 MiB free)",)
    assert probe.reason == (
        "does not load a DFlash 2 drafter: "
        "llama_model_load: error loading model: wrong number of tensors; expected 60, got 58"
    )


def test_a_server_without_its_libraries_does_not_start(patched, tmp_path):
    alone = Path(shutil.copy(patched.server, tmp_path))
    reason = probe_server(alone).reason
    assert reason.startswith("does not start: ")
    assert "libllama-server-impl" in reason


def test_a_program_for_another_machine_cannot_be_run(patched, tmp_path):
    foreign = Path(shutil.copy(patched.server, tmp_path))
    with foreign.open("r+b") as file:
        file.seek(18)  # e_machine of an ELF header
        file.write(b"\xff\x7f")
    assert probe_server(foreign).reason == "cannot be run: Exec format error"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("#!/bin/sh\nkill -ILL $$\n", "does not start: it was built for another CPU (illegal instruction)"),
        ("#!/bin/sh\nkill -SEGV $$\n", "does not start: it was ended by signal 11"),
        ("#!/bin/sh\nexit 3\n", "does not start: exit status 3"),
        ("#!/bin/sh\necho hello\n", "is no llama-server: it does not say its version"),
        ("#!/no/such/shell\n", "cannot be run: No such file or directory"),
    ],
)
def test_what_is_no_server_is_told_in_one_clause(program, text, reason):
    assert probe_server(program(text)).reason == reason


def test_a_missing_program_cannot_be_run(tmp_path):
    assert probe_server(tmp_path / "none").reason == "cannot be run: No such file or directory"
