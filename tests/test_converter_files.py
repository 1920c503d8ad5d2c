"""Which files a conversion may replace, what it makes of links, pipes and long names, and how it ends on a signal."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from factories import drafter_config, drafter_tensors, make_drafter, make_target, write_checkpoint
from factories_tokenizers import train_byte_level, write_target_config

from dflash2.converter import DraftVocabulary, check, convert, inspect, upgrade
from dflash2.errors import CheckpointError, Dflash2Error, GGUFError, OutputError

BIN = Path(sys.executable).parent
posix = pytest.mark.skipif(sys.platform == "win32", reason="pipes, links and signals of POSIX")


@pytest.fixture
def target(tmp_path):
    return make_target(tmp_path / "target.gguf")


@pytest.fixture
def drafter(tmp_path):
    return make_drafter(tmp_path / "drafter")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_kept(tmp_path: Path, says: str, action) -> None:
    """`action` is refused with an OutputError and changes no file."""
    before = contents(tmp_path)
    with pytest.raises(OutputError, match=says):
        action()
    assert contents(tmp_path) == before


# --- what is read is never replaced


@pytest.mark.parametrize("in_folder", ["README.md", "config.json", "model.safetensors", "notes.txt", "sub/image.png"])
def test_no_file_of_the_drafters_folder_is_replaced(tmp_path, target, drafter, in_folder):
    (drafter / "sub").mkdir()
    for name in ("README.md", "notes.txt", "sub/image.png"):
        (drafter / name).write_text("---\nlicense: mit\n---\n")
    says = "it is (an input of this conversion|a file of the checkpoint in .*drafter); give another path"
    assert_kept(tmp_path, says, lambda: convert(drafter, target, drafter / in_folder))


def test_gguf_beside_the_checkpoint_is_replaced(target, drafter):
    (drafter / "out.gguf").write_bytes(b"old")
    convert(drafter, target, drafter / "out.gguf")
    assert inspect(drafter / "out.gguf").kind == "drafter"


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "generation_config.json"])
def test_no_file_of_the_targets_folder_is_replaced(tmp_path, name):
    drafter, folder = make_drafter(tmp_path / "drafter"), write_target_config(train_byte_level(tmp_path / "hf"))
    (folder / "generation_config.json").write_text("{}")
    says = "it is a file of the checkpoint in .*hf; give another path"
    assert_kept(tmp_path, says, lambda: convert(drafter, folder, folder / name))


def test_hard_link_to_an_input_is_not_replaced(tmp_path, target, drafter):
    os.link(drafter / "model.safetensors", tmp_path / "other.gguf")
    assert_kept(tmp_path, "it is an input", lambda: convert(drafter, target, tmp_path / "other.gguf"))


def test_index_is_not_replaced(tmp_path, target):
    config = drafter_config()
    drafter = write_checkpoint(tmp_path / "sharded", config, drafter_tensors(config), shards=2, index=True)
    index = next(drafter.glob("*.index.json"))
    assert_kept(tmp_path, "it is an input", lambda: convert(drafter, target, index))


def test_other_parts_of_the_target_are_not_replaced(tmp_path, target, drafter):
    first, second = tmp_path / "t-00001-of-00002.gguf", tmp_path / "t-00002-of-00002.gguf"
    target.rename(first)
    shutil.copy(first, second)
    assert_kept(tmp_path, "it is an input", lambda: convert(drafter, first, second))


def test_frequencies_are_not_replaced(tmp_path, target, drafter):
    counts = tmp_path / "counts.txt"
    counts.write_text("5 10\n")
    wanted = DraftVocabulary(200, (counts,))
    assert_kept(tmp_path, "it is an input", lambda: convert(drafter, target, counts, draft_vocab=wanted))


def test_upgrade_does_not_replace_its_target(tmp_path, target, drafter):
    old = tmp_path / "old.gguf"
    convert(drafter, target, old)
    replace = lambda: upgrade(old, target, target=target, causal_swa=True)  # noqa: E731
    assert_kept(tmp_path, "it is an input", replace)


# --- links


@posix
@pytest.mark.parametrize("dangling", [False, True])
def test_link_is_followed(tmp_path, target, drafter, dangling):
    link, real = tmp_path / "link.gguf", tmp_path / "elsewhere" / "real.gguf"
    real.parent.mkdir()
    if not dangling:
        real.write_bytes(b"old")
    link.symlink_to(real)
    convert(drafter, target, link)
    assert link.is_symlink()
    assert inspect(real).kind == "drafter"
    assert [path.name for path in real.parent.iterdir()] == ["real.gguf"]


@posix
def test_link_to_nowhere_names_the_missing_folder(tmp_path, target, drafter):
    (tmp_path / "link").symlink_to(tmp_path / "missing" / "out.gguf")
    assert_kept(tmp_path, "the folder .*missing does not exist", lambda: convert(drafter, target, tmp_path / "link"))


@posix
def test_link_to_itself_is_refused(tmp_path, target, drafter):
    (tmp_path / "loop").symlink_to("loop")
    assert_kept(tmp_path, "a link that leads to itself", lambda: convert(drafter, target, tmp_path / "loop"))


# --- pipes: a process of its own, which a hanging one is ended as

PIPE = "it is a pipe, socket or device; give a file."


def in_time(call: str, *paths: Path) -> str:
    script = (
        "import sys\nfrom pathlib import Path\nfrom dflash2 import converter\nfrom dflash2.errors import Dflash2Error\n"
        f"paths = list(map(Path, sys.argv[1:]))\ntry:\n    converter.{call}(*paths)\n"
        "except Dflash2Error as error:\n    print(error)\n"
    )
    command = [sys.executable, "-c", script, *map(str, paths)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


@posix
@pytest.mark.parametrize("call", ["convert", "check", "inspect", "upgrade"])
def test_pipe_for_a_gguf_is_refused(tmp_path, drafter, call):
    pipe = tmp_path / "pipe.gguf"
    os.mkfifo(pipe)
    paths = {"convert": (drafter, pipe, tmp_path / "out.gguf"), "check": (drafter, pipe)}.get(call, (pipe,))
    assert in_time(call, *paths) == f"Cannot read {pipe}: {PIPE}\n"


@posix
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "mask_embedding.pt", "x.safetensors.index.json"])
def test_pipe_in_the_drafters_folder_is_refused(tmp_path, target, drafter, name):
    (drafter / name).unlink(missing_ok=True)
    os.mkfifo(drafter / name)
    assert in_time("convert", drafter, target, tmp_path / "out.gguf") == f"Cannot read {drafter / name}: {PIPE}\n"


# --- names that no file system takes

LONG = "x" * 300


def test_long_names_are_one_sentence(tmp_path, target, drafter):
    long, output = tmp_path / LONG, tmp_path / "out.gguf"
    calls = {
        CheckpointError: [lambda: convert(long, target, output)],
        OutputError: [lambda: convert(drafter, target, long)],
        GGUFError: [lambda: inspect(long), lambda: upgrade(long, output)],
        Dflash2Error: [
            lambda: convert(drafter, long, output),
            lambda: check(long, target),
            lambda: check(drafter, long),
        ],
    }
    for error, actions in calls.items():
        for action in actions:
            with pytest.raises(error, match=r"File name too long\.$"):
                action()


def test_zero_byte_in_a_name_is_one_sentence(tmp_path, target, drafter):
    odd = tmp_path / "a\0b"
    for action in (
        lambda: convert(odd, target, tmp_path / "out.gguf"),
        lambda: convert(drafter, odd, tmp_path / "out.gguf"),
        lambda: convert(drafter, target, odd),
        lambda: inspect(odd),
    ):
        with pytest.raises(Dflash2Error):
            action()


def test_long_name_in_the_index_is_one_sentence(tmp_path, target, drafter):
    (drafter / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": f"{LONG}.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"File name too long\.$"):
        convert(drafter, target, tmp_path / "out.gguf")


@pytest.mark.parametrize("outtype", ["bf16", "q5_k_m"])
@pytest.mark.parametrize("stem", ["x" * 240, "\u00e4" * 120, "\U0001f600" * 60])
def test_longest_legal_name_is_written(tmp_path, target, drafter, stem, outtype):
    output = tmp_path / f"{stem}.gguf"
    convert(drafter, target, output, outtype=outtype)
    assert inspect(output).kind == "drafter"


# --- the commands


def run(command: str, *arguments: object, **options) -> "subprocess.CompletedProcess[str]":
    words = [BIN / command, *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=60, **options)


@pytest.mark.parametrize("drafter_name", [LONG, f"owner/{LONG}"])
def test_long_drafter_is_no_complaint_about_the_output(tmp_path, target, drafter_name):
    result = run("dflash2-convert", drafter_name, "--target", target, cwd=tmp_path)
    assert result.returncode in {1, 2}
    assert "output" not in result.stderr
    assert "Traceback" not in result.stderr
    assert LONG[:20] in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [("convert", "", "--target", "target.gguf"), ("convert", ".", "--target", ""), ("check", "", "target.gguf"),
     ("upgrade", ""), ("inspect", "")],
)  # fmt: skip
def test_empty_path_is_refused(target, drafter, arguments):
    shutil.copy(target, drafter / "target.gguf")
    before = sorted(drafter.iterdir())
    result = run("dflash2", *arguments, cwd=drafter)
    assert result.returncode in {1, 2}
    assert "empty" in result.stderr
    assert sorted(drafter.iterdir()) == before


@pytest.mark.parametrize("with_target", [False, True])
def test_gguf_given_as_drafter_is_said_to_be_one(tmp_path, target, with_target):
    result = run("dflash2-convert", target, *(["--target", target] if with_target else []), cwd=tmp_path)
    assert result.returncode == 1
    assert result.stderr == (
        f"error: {target} is a GGUF file already; `dflash2 inspect` says what it is, `dflash2 upgrade` puts the"
        " metadata of a drafter right.\n"
    )


# Sends itself the signal in the middle of writing.
SIGNALLED = """
import os, sys
from dflash2.commands import convert as command
from dflash2 import cli, converter

number, sys.argv = int(sys.argv[1]), sys.argv[1:]
real = converter.convert
def convert(*arguments, progress, **options):
    def report(done, total):
        if 0 < done < total:
            os.kill(os.getpid(), number)
    return real(*arguments, progress=report, **options)
converter.convert = convert
cli.convert_main()
"""


@posix
@pytest.mark.parametrize("outtype", ["bf16", "q5_0"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signal_leaves_no_temporary_file(tmp_path, target, drafter, number, outtype):
    output = tmp_path / "out" / "out.gguf"
    output.parent.mkdir()
    output.write_bytes(b"old")
    command = [sys.executable, "-c", SIGNALLED, str(int(number)), str(drafter), "--target", str(target)]
    command += ["-o", str(output), "--outtype", outtype]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 128 + number, result.stderr
    assert contents(output.parent) == {str(output): b"old"}
    assert "Traceback" not in result.stderr
