"""The commands as a user runs them: real processes, their output and exit status."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent


def run(command: str, *arguments: object, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [BIN / command, *map(str, arguments)], capture_output=True, text=True, check=False, timeout=600, **options
    )


def edited_drafter(source: Path, folder: Path, edit) -> Path:
    """Copy a drafter folder and let `edit` change its config in place."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    edit(config)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def without(key: str):
    def edit(config):
        config.pop(key, None)
        config["dflash_config"].pop(key, None)

    return edit


def unchanged(_config):
    pass


def setting(**values):
    return lambda config: config.update(values)


def test_convert_then_inspect_then_run(demo, tmp_path):
    output = tmp_path / "drafter.gguf"
    converted = run("dflash2-convert", demo.drafter, "--target", demo.target, "-o", output)
    assert converted.returncode == 0, converted.stderr
    assert str(output) in converted.stdout

    inspected = run("dflash2", "inspect", output)
    assert inspected.returncode == 0, inspected.stderr
    for fact in ("DFlash 2 drafter", "1, 3, 5", "0, 2, 4", "window 64 tokens, not causal", "top 16, rank 64"):
        assert fact in inspected.stdout

    arguments = (demo.target, output, demo.prompts[0], "-n", 48, "-t", 2)
    drafted = run("dflash2", "run", *arguments)
    plain = run("dflash2", "run", *arguments, "--depth", 0)
    assert drafted.returncode == 0, drafted.stderr
    assert drafted.stdout.strip()
    assert drafted.stdout == plain.stdout
    assert "accepted length" in drafted.stderr
    assert "48 tokens" in drafted.stderr


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (without("mask_token_id"), "mask_token_id"),
        (without("block_size"), "block_size"),
        (without("target_layer_ids"), "target_layer_ids"),
        (setting(architectures=["LlamaForCausalLM"]), "LlamaForCausalLM"),
        (setting(hidden_size=320), "hidden"),
        (lambda config: config["dflash_config"].update(target_layer_ids=[0, 2, 6]), "6"),
        (setting(vocab_size=2048), "vocab"),
    ],
    ids=["no mask", "no block size", "no taps", "architecture", "hidden size", "tap beyond", "vocabulary"],
)
def test_bad_config_is_one_sentence_and_leaves_nothing(demo, tmp_path, edit, says):
    drafter = edited_drafter(demo.drafter, tmp_path / "drafter", edit)
    assert_refused(drafter, demo.target, tmp_path / "out" / "drafter.gguf", says)


def test_truncated_safetensors_is_one_sentence_and_leaves_nothing(demo, tmp_path):
    drafter = edited_drafter(demo.drafter, tmp_path / "drafter", unchanged)
    weights = drafter / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert_refused(drafter, demo.target, tmp_path / "out" / "drafter.gguf", "model.safetensors")


def test_missing_shard_is_one_sentence_and_leaves_nothing(demo, tmp_path):
    drafter = edited_drafter(demo.drafter, tmp_path / "drafter", unchanged)
    (drafter / "model.safetensors").rename(drafter / "model-00001-of-00002.safetensors")
    index = {
        "weight_map": {
            "fc.weight": "model-00001-of-00002.safetensors",
            "norm.weight": "model-00002-of-00002.safetensors",
        }
    }
    (drafter / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_refused(drafter, demo.target, tmp_path / "out" / "drafter.gguf", "model-00002-of-00002.safetensors")


def test_output_that_cannot_be_written_is_one_sentence(demo, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    output = tmp_path / "file" / "drafter.gguf"
    result = run("dflash2-convert", demo.drafter, "--target", demo.target, "-o", output)
    assert_one_sentence(result, str(tmp_path / "file"))


def assert_refused(drafter: Path, target: Path, output: Path, says: str) -> None:
    output.parent.mkdir()
    assert_one_sentence(run("dflash2-convert", drafter, "--target", target, "-o", output), says)
    assert list(output.parent.iterdir()) == []


def assert_one_sentence(result: subprocess.CompletedProcess, says: str) -> None:
    assert result.returncode == 1
    assert result.stdout == ""
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    assert says in lines[0]


@pytest.mark.parametrize("command", [("dflash2", "--debug", "convert"), ("dflash2-convert", "--debug")])
def test_debug_shows_the_traceback(demo, tmp_path, command):
    result = run(*command, tmp_path, "--target", demo.target, "-o", tmp_path / "out.gguf")
    assert result.returncode == 1
    assert "Traceback" in result.stderr


def test_debug_may_follow_the_name_of_a_command_and_is_in_its_help(tmp_path):
    assert "Traceback" in run("dflash2", "inspect", tmp_path / "gone", "--debug").stderr
    assert "--debug" in run("dflash2-convert", "--help").stdout


def test_drafter_given_as_target_is_one_sentence(drafter_gguf, tmp_path):
    assert_one_sentence(run("dflash2", "run", drafter_gguf, drafter_gguf, "hello", cwd=tmp_path), str(drafter_gguf))


def test_output_that_is_a_pipe_is_refused_and_stays_a_pipe(demo, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert_one_sentence(run("dflash2-convert", demo.drafter, "--target", demo.target, "-o", pipe), "pipe")
    assert pipe.is_fifo()


def test_prompt_beyond_the_context_is_one_sentence(demo, drafter_gguf):
    result = run("dflash2", "run", demo.target, drafter_gguf, "def main():" * 300, "-n", 20, "-c", 128)
    assert_one_sentence(result, "raise it with -c")


def test_terminal_without_the_characters_of_a_path_still_gets_the_result(demo, tmp_path):
    output = tmp_path / "dräfter.gguf"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    result = run("dflash2-convert", demo.drafter, "--target", demo.target, "-o", output, env=environment)
    assert result.returncode == 0, result.stderr
    assert output.is_file()
    assert "dr?fter.gguf" in result.stdout


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_full_standard_output_is_one_sentence(demo, drafter_gguf):
    with Path("/dev/full").open("w") as full:
        command = [BIN / "dflash2", "run", demo.target, drafter_gguf, "def main():", "-n", "8"]
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith("error: cannot write the output")
    assert "Traceback" not in result.stderr


def test_demo_shows_equal_tokens_and_the_speedup_as_l_over_c():
    result = run("dflash2", "demo", "--prompts", 2, "--tokens", 48)
    assert result.returncode == 0, result.stderr
    rows = {cells[0]: cells[1:] for line in result.stdout.splitlines() if (cells := cells_of(line))}
    assert rows["token ids equal"][0] == "2 of 2 prompts"
    for column in (0, 1):
        length, cost = float(rows["L, accepted length"][column]), float(rows["c(w), cycle / token"][column])
        speedup = float(rows["speedup, L / c(w)"][column].rstrip("x"))
        assert length > 1
        assert speedup == pytest.approx(length / cost, rel=0.02, abs=0.006)  # three rounded figures


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("│").split("│")] if line.startswith("│") else []


# Ends as the program does when Ctrl-C comes while the module of that name is being imported.
INTERRUPTED = """
import os, signal, sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
from dflash2.cli import main

main()
"""


@pytest.mark.parametrize("module", ["click", "numpy", "dflash2.commands.serve", "dflash2.modelfiles.serving"])
def test_an_interrupt_while_it_is_imported_ends_quietly(module):
    done = subprocess.run([sys.executable, "-c", INTERRUPTED, module], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
