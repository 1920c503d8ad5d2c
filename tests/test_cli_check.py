"""inspect, check, upgrade and list as a user runs them: real processes, their output and exit status."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from factories import make_drafter, make_target
from factories_check import edited_gguf, make_fork, tensor_bytes
from gguf.constants import GGUFValueType
from test_cli import run

from dflash2.converter import check, convert, inspect
from dflash2.errors import GGUFError


@pytest.fixture
def target(tmp_path):
    return make_target(tmp_path / "target.gguf")


@pytest.fixture
def converted(tmp_path, target):
    return convert(make_drafter(tmp_path / "drafter"), target, tmp_path / "converted.gguf").output


def test_check_of_a_good_pair_ends_with_status_0(converted, target):
    result = run("dflash2", "check", converted, target)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.endswith(" checks: 0 errors, 0 warnings\n")
    shown = run("dflash2", "check", "--all", converted, target)
    assert "ok: tap_range: 1, 3, 4" in shown.stdout


def test_check_says_what_to_do_and_ends_with_status_1(tmp_path, converted):
    result = run("dflash2", "check", converted, make_target(tmp_path / "other.gguf", hidden=128))
    assert result.returncode == 1
    assert "error: hidden_size: 128, expected 64; use the target the drafter was trained for" in result.stdout
    as_json = run("dflash2", "check", "--json", converted, tmp_path / "other.gguf")
    assert as_json.returncode == 1
    assert json.loads(as_json.stdout)["errors"] == 1


def test_warnings_fail_with_strict_alone(tmp_path, target):
    drafter = make_drafter(tmp_path / "drafter", num_target_layers=36)
    assert run("dflash2", "check", drafter, target).returncode == 0
    assert run("dflash2", "check", "--strict", drafter, target).returncode == 1


def test_check_without_a_library_is_a_warning(tmp_path, converted, target):
    """As on a machine where llama-cpp-python is not installed."""
    (tmp_path / "llama_cpp").mkdir()
    (tmp_path / "llama_cpp" / "__init__.py").write_text("raise ImportError('no llama_cpp here')")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    result = run("dflash2", "check", "--json", converted, target, env=environment)
    assert result.returncode == 0, result.stderr
    library = json.loads(result.stdout)["findings"][-1]
    assert (library["level"], library["key"]) == ("warning", "library")
    assert "no llama_cpp here" in library["found"]
    listed = run("dflash2", "list", "--json", env=environment)
    assert listed.returncode == 0, listed.stderr
    pairs = {pair["key"]: pair["runs_here"] for pair in json.loads(listed.stdout)["pairs"]}
    assert (pairs["qwen3.8-27b"], pairs["kimi-k2.5"]) == (None, False)


def test_inspect_as_json(converted):
    result = run("dflash2", "inspect", "--json", "--tensors", converted)
    assert result.returncode == 0, result.stderr
    seen = json.loads(result.stdout)
    assert (seen["kind"], seen["drafter"]["gguf_taps"], len(seen["tensors"])) == ("drafter", [1, 3, 4], 36)


def test_inspect_of_a_folder_and_of_an_empty_path(tmp_path):
    folder = make_drafter(tmp_path / "drafter", architectures=["LlamaForCausalLM"])
    result = run("dflash2", "inspect", folder)
    assert result.returncode == 0, result.stderr
    assert "convertible" in result.stdout
    empty = run("dflash2", "inspect", "")
    assert (empty.returncode, empty.stdout) == (1, "")
    assert empty.stderr == "error: the path is empty; give a GGUF file or the folder of a checkpoint.\n"


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("qwen3.8-27b", "`dflash2-convert qwen3.8-27b` and"),
        ("incoai/Qwen3.8-27B-DFlash2", "`dflash2-convert incoai/Qwen3.8-27B-DFlash2` and"),
        ("someone/drafter", "`dflash2-convert someone/drafter --target TARGET` and"),
    ],
)
def test_what_reads_local_files_says_what_to_run_for_a_name(tmp_path, monkeypatch, converted, target, name, command):
    monkeypatch.chdir(tmp_path)
    for call in (lambda: inspect(name), lambda: check(name, target)):
        with pytest.raises(GGUFError, match=f"{name} is no file or folder here, and only local ones are read; run"):
            call()
        with pytest.raises(GGUFError, match=command):
            call()
    with pytest.raises(GGUFError, match=r"only local ones are read; give the target's GGUF file, or the folder"):
        check(converted, name)


@pytest.mark.parametrize("name", ["gone.gguf", "folder/gone.gguf", "a/b/c", "gone"])
def test_a_missing_path_is_still_a_missing_path(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(GGUFError, match=f"Cannot read {name}: No such file"):
        inspect(name)


def test_upgrade_says_what_it_changed_then_that_nothing_is_left(tmp_path, converted):
    fork = make_fork(converted, tmp_path / "fork.gguf")
    done = run("dflash2", "upgrade", fork, "-o", tmp_path / "new.gguf")
    assert done.returncode == 0, done.stderr
    assert "general.architecture: dflash-draft -> dflash\n" in done.stdout
    assert "dflash-draft.dflash.target_layer_ids = [0, 2, 3] -> dflash.target_layers = [1, 3, 4]\n" in done.stdout
    assert "dflash_fc.weight -> fc.weight\n" in done.stdout
    assert tensor_bytes(tmp_path / "new.gguf") == tensor_bytes(converted)
    again = run("dflash2", "upgrade", tmp_path / "new.gguf")
    assert (again.returncode, "is up to date: nothing was written" in again.stdout) == (0, True)


def test_upgrade_refuses_its_own_input_and_takes_it_in_place(tmp_path, converted):
    fork = make_fork(converted, tmp_path / "fork.gguf")
    refused = run("dflash2", "upgrade", fork, "-o", fork)
    assert refused.returncode == 1
    assert "use --in-place" in refused.stderr
    assert run("dflash2", "upgrade", fork, "--in-place").returncode == 0
    assert tensor_bytes(fork) == tensor_bytes(converted)


def test_upgrade_adds_what_the_user_says(tmp_path, converted):
    bare = edited_gguf(converted, tmp_path / "bare.gguf", without=("tokenizer.ggml.mask_token_id",))
    options = ("--mask-token-id", 1, "--causal-swa", "on")
    result = run("dflash2", "upgrade", bare, "-o", tmp_path / "new.gguf", *options)
    assert result.returncode == 0, result.stderr
    assert "added tokenizer.ggml.mask_token_id = 1\n" in result.stdout
    assert "added dflash.attention.causal_swa = true\n" in result.stdout


def test_run_names_the_next_step_for_a_folder_and_for_a_fork(tmp_path, converted, target):
    folder = run("dflash2", "run", target, tmp_path / "drafter", "hello")
    assert folder.returncode == 1
    assert "convert it first with dflash2-convert" in folder.stderr
    forked = run("dflash2", "run", target, make_fork(converted, tmp_path / "fork.gguf"), "hello")
    assert forked.returncode == 1
    assert "run dflash2 upgrade on it" in forked.stderr


def test_list_shows_every_pair_and_why_one_cannot_run():
    result = run("dflash2", "list")
    assert result.returncode == 0, result.stderr
    lines = {line.split()[1]: line for line in result.stdout.splitlines() if line.startswith("│ ") and line[2] != " "}
    assert len(lines) == 17
    assert lines["qwen3.8-27b"].rstrip(" │").endswith("yes")
    answers = {key: [cell.strip() for cell in line.split("│")][-3:-1] for key, line in lines.items()}
    assert answers["kimi-k2.5"] == ["yes", "no"]
    assert answers["gpt-oss-20b"] == ["no", "no"]
    assert answers["mimo-v2.5-pro"] == ["option", "yes"]
    assert "mimo-v2.5-pro: convert with --rope-theta THETA: the checkpoint names two bases;" in result.stdout
    assert "kimi-k2.5: llama.cpp publishes no layer inputs for deepseek2 targets\n" in result.stdout


def test_a_plain_script_gets_the_same_answers(converted, target):
    code = (
        "import sys; from dflash2.converter import check, inspect\n"
        "print(check(sys.argv[1], sys.argv[2]).passes(strict=True), inspect(sys.argv[1]).drafter.version)"
    )
    done = subprocess.run(
        [Path(sys.executable), "-c", code, converted, target], capture_output=True, text=True, check=True
    )
    assert done.stdout == "True 2\n"


def test_names_in_a_model_file_cannot_steer_the_terminal(tmp_path):
    name = ("red \x1b[31m, back \r, reversed \u202e", GGUFValueType.STRING, None)
    target = make_target(tmp_path / "target.gguf", metadata={"general.name": name})
    shown = run("dflash2", "inspect", target).stdout
    assert r"red \x1b[31m, back \r, reversed \u202e" in " ".join(shown.split())
    assert not {"\x1b", "\r", "\u202e"} & set(shown)
