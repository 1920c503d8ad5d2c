"""`dflash2 modelfile` as users run it: real processes, the demo pair, what lands in the file and on both streams."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from factories import make_drafter, make_target, safetensors_bytes
from factories_tokenizers import train_byte_level, write_target_config
from hub_server import HubServer, Repository

from dflash2.converter import convert
from dflash2.modelfiles import Modelfile

BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A target, its drafter as folder, as BF16 and as F32 GGUF; a target that does not fit; a Modelfile."""
    folder = tmp_path_factory.mktemp("modelfile")
    target = make_target(folder / "target.gguf")
    make_drafter(folder / "drafter")
    for outtype in ("bf16", "f32"):
        convert(folder / "drafter", target, folder / f"{outtype}.gguf", outtype=outtype)
    make_target(folder / "other.gguf", vocab=300)
    whole = write_target_config(train_byte_level(folder / "target-folder"))
    (whole / "model.safetensors").write_bytes(safetensors_bytes("{}"))
    (folder / "Old").write_bytes(
        b'# mine\r\nFROM ./x\r\nDRAFT a\r\nDRAFT b\r\nSYSTEM "hi\r\nyou"\r\n\tPARAMETER seed 1'
    )
    return folder


@pytest.fixture
def run(folder, tmp_path):
    def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [BIN / "dflash2", "modelfile", *map(str, arguments)],
            capture_output=True,
            check=False,
            cwd=folder,
            env={**os.environ, "DFLASH2_CACHE": str(tmp_path / "cache"), "PYTHONUTF8": "1", **environment},
        )

    return run


def create_line(done: subprocess.CompletedProcess) -> list[str]:
    return shlex.split(next(line for line in done.stderr.decode().splitlines() if line.startswith("ollama create")))


def parameters_of(text: bytes) -> dict:
    return Modelfile.parse(text).parameters


def test_two_files_give_from_draft_and_depth(run, folder):
    done = run("target.gguf", "bf16.gguf")
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode() == (
        f"FROM {folder.resolve()}/target.gguf\nDRAFT {folder.resolve()}/bf16.gguf\nPARAMETER draft_num_predict 3\n"
    )
    assert create_line(done) == ["ollama", "create", "target-dflash2", "-f", "Modelfile"]
    assert b"dflash2 ollama runner install" in done.stderr
    assert b"share one runner" in done.stderr


def test_every_option_ends_up_in_the_file(run, folder, tmp_path):
    (tmp_path / "licence.txt").write_bytes('Do what\nyou want: "é"\n'.encode())
    output = tmp_path / "my model file"
    done = run(
        "target.gguf", "drafter", "-o", output, "--draft-num-predict", 2, "--num-ctx", 8192, "--parameter",
        "temperature=0.7", "--parameter", "stop=<a> ", "--parameter", "stop=b=c", "--template", "{{ .Prompt }}\n",
        "--system", "@@home # no comment", "--renderer", "qwen3", "--parser", "qwen3", "--license",
        f"@{tmp_path / 'licence.txt'}", "--license", "MIT", "--message", "user", "hi",
        "--message", "assistant", ' "yo" ', "--requires", "0.14.0", "--name", "it's mine", "--draft-quantize", "q8_0",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == b""
    file = Modelfile.parse(output.read_bytes())
    assert file.value("model") == str((folder / "target.gguf").resolve())
    assert Path(file.value("draft")).parent == tmp_path / "cache" / "drafters"
    assert file.parameters == {
        "draft_num_predict": 2, "temperature": pytest.approx(0.7), "stop": ("<a> ", "b=c"), "num_ctx": 8192
    }  # fmt: skip
    assert file.values("template") == ("{{ .Prompt }}\n",)
    assert file.values("system") == ("@home # no comment",)
    assert file.values("license") == ('Do what\nyou want: "é"\n', "MIT")
    assert file.messages == (("user", "hi"), ("assistant", ' "yo" '))
    assert [file.value(name) for name in ("renderer", "parser", "requires")] == ["qwen3", "qwen3", "0.14.0"]
    assert create_line(done) == ["ollama", "create", "it's mine", "-f", str(output), "--draft-quantize", "Q8_0"]


def test_an_existing_modelfile_is_changed_and_kept(run, folder, tmp_path):
    shutil.copy(folder / "Old", tmp_path / "New")
    done = run("target.gguf", "bf16.gguf", "--from-modelfile", tmp_path / "New", "-o", tmp_path / "New")
    assert done.returncode == 0, done.stderr
    real = folder.resolve()
    assert (tmp_path / "New").read_bytes().decode() == (
        f'# mine\r\nFROM {real}/target.gguf\r\nDRAFT {real}/bf16.gguf\r\nSYSTEM "hi\r\nyou"\r\n\tPARAMETER seed 1\r\n'
        "PARAMETER draft_num_predict 3\r\n"
    )


def test_an_adapter_that_would_be_lost_is_named(run, folder, tmp_path):
    (folder / "lora.gguf").touch()
    (folder / "WithAdapter").write_text("FROM x\nADAPTER ./lora.gguf\n")
    note = b"./lora.gguf is relative to ."
    assert note in run("target.gguf", "bf16.gguf", "--from-modelfile", "WithAdapter", "-o", tmp_path / "New").stderr
    assert note not in run("target.gguf", "bf16.gguf", "--from-modelfile", "WithAdapter", "-o", "New").stderr


@pytest.mark.parametrize("name", ["a b", " a", "a:key:b", "a#b", '"a', "a\nb", "'a'", "é漢", "-a"])
def test_paths_of_all_kinds_are_what_ollama_will_read(run, folder, tmp_path, name):
    odd = tmp_path / name
    odd.mkdir()
    shutil.copy(folder / "target.gguf", odd / f"{name} .gguf")
    done = run(odd / f"{name} .gguf", "bf16.gguf", "-o", odd / "Modelfile")
    assert done.returncode == 0, done.stderr
    if "\n" not in name:
        assert create_line(done)[-1] == str(odd / "Modelfile")
    assert Modelfile.parse((odd / "Modelfile").read_bytes()).value("model") == str(odd.resolve() / f"{name} .gguf")


def test_a_link_is_followed_to_the_file(run, folder, tmp_path):
    (tmp_path / "link.gguf").symlink_to(folder / "target.gguf")
    done = run(tmp_path / "link.gguf", "bf16.gguf")
    assert Modelfile.parse(done.stdout).value("model") == str((folder / "target.gguf").resolve())


@pytest.mark.parametrize(
    ("arguments", "status", "sentence"),
    [
        (["other.gguf", "bf16.gguf"], 1, "bf16.gguf does not work with other.gguf: vocab_size is 288"),
        (["target.gguf", "target.gguf"], 1, "is no DFlash drafter"),
        (["target.gguf", "missing.gguf"], 1, "'missing.gguf' is no file or folder here"),
        (["target.gguf"], 1, "'target.gguf' is no published pair, so its drafter must be named too"),
        (["target.gguf", "bf16.gguf", "--draft-num-predict", "4"], 2, "this drafter drafts at most 3"),
        (
            ["target.gguf", "bf16.gguf", "--parameter", "top=1"],
            1,
            "would refuse the Modelfile: unknown parameter 'top'",
        ),
        (["target.gguf", "bf16.gguf", "--parameter", "seed=x"], 1, "invalid int value [x]"),
        (["target.gguf", "bf16.gguf", "--parameter", "seed"], 2, "'seed' is not NAME=VALUE"),
        (["target.gguf", "bf16.gguf", "--parameter", "seed=1", "--parameter", "seed=2"], 2, "seed is given twice"),
        (["target.gguf", "bf16.gguf", "--parameter", "num_ctx=1", "--num-ctx", "2"], 2, "num_ctx is given twice"),
        (["target.gguf", "bf16.gguf", "--parameter", "draft_num_predict=1"], 2, "as --draft-num-predict"),
        (["target.gguf", "bf16.gguf", "--message", "User", "hi"], 2, "'User' is not one of"),
        (["target.gguf", "bf16.gguf", "--system", "a\u00a0b"], 1, "SYSTEM holds the character U+00A0"),
        (["target.gguf", "bf16.gguf", "--requires", "soon"], 1, "requires must be a valid semver"),
        (["target.gguf", "bf16.gguf", "--draft-quantize", "int4"], 1, "int4 is not possible on the gguf route"),
        (["target.gguf", "f32.gguf", "--draft-quantize", "q8_0"], 1, "needs a drafter in F16 or BF16, and this one is"),
        (["target.gguf", "bf16.gguf", "--from-modelfile", "bf16.gguf"], 1, "bf16.gguf: "),
        (["target.gguf", "bf16.gguf", "--from-modelfile", "none"], 1, "none"),
        (["org/x", "org/y", "-o", "none/Modelfile"], 1, "Cannot write none/Modelfile: the folder none does not exist"),
        (["target.gguf", "bf16.gguf", "-o", "bf16.gguf"], 1, "Cannot write bf16.gguf: it is a GGUF file"),
        (["org/x", "org/y", "--parameter", "top=1"], 1, "would refuse the Modelfile: unknown parameter 'top'"),
        (["target.gguf", "bf16.gguf", "--route", "mlx"], 1, "is no folder of safetensors files"),
        (["drafter", "drafter", "--route", "mlx", "--draft-num-predict", "3"], 2, "has no effect on the mlx route"),
    ],
)
def test_what_cannot_be_is_one_sentence_and_no_file(run, arguments, status, sentence):
    done = run(*arguments)
    shown = " ".join(done.stderr.decode().replace("│", " ").split())
    assert (done.returncode, done.stdout) == (status, b"")
    assert sentence in shown, shown


def test_no_check_only_warns(run):
    done = run("other.gguf", "bf16.gguf", "--no-check")
    assert done.returncode == 0
    assert b"error: vocab_size: 288, expected 300" in done.stderr
    assert parameters_of(done.stdout) == {"draft_num_predict": 3}


def test_a_split_target_is_refused(run, folder):
    from gguf.constants import GGUFValueType

    make_target(folder / "t-00001-of-00002.gguf", metadata={"split.count": (2, GGUFValueType.UINT16, None)})
    done = run("t-00001-of-00002.gguf", "bf16.gguf", "--no-check")
    assert done.returncode == 1
    assert b"llama-gguf-split --merge" in done.stderr


def test_the_mlx_route_names_folders_and_what_has_no_effect(run, folder):
    done = run("target-folder", "drafter", "--route", "mlx", "--draft-quantize", "INT4", "--message", "user", "x")
    assert done.returncode == 0, done.stderr
    real = folder.resolve()
    assert done.stdout.decode() == f"FROM {real}/target-folder\nDRAFT {real}/drafter\nMESSAGE user x\n"
    assert create_line(done)[-3:] == ["--experimental", "--draft-quantize", "int4"]
    for note in (b"ignores MESSAGE", b"draft_num_predict has no effect", b"pull request 17865"):
        assert note in done.stderr


def test_the_mlx_route_refuses_links_that_leave_their_folder(run, folder, tmp_path):
    (tmp_path / "linked").mkdir()
    for path in (folder / "drafter").iterdir():
        (tmp_path / "linked" / path.name).symlink_to(path)
    done = run("target-folder", tmp_path / "linked", "--route", "mlx")
    assert done.returncode == 1
    assert b"is a link that leaves its folder" in done.stderr


def test_folders_from_the_hub_are_plain_files(run, folder, tmp_path):
    names = {"org/big": "target-folder", "org/draft": "drafter"}
    files = {spec: {path.name: path.read_bytes() for path in (folder / name).iterdir()} for spec, name in names.items()}
    with HubServer({spec: Repository({**held, "x.bin": b""}) for spec, held in files.items()}) as hub:
        environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1"}
        done = run("org/big", "org/draft", "--route", "mlx", **environment)
        assert done.returncode == 0, done.stderr
        assert "x.bin" not in hub.downloaded()
    file = Modelfile.parse(done.stdout)
    for spec, place in zip(files, map(Path, (file.value("model"), file.value("draft"))), strict=True):
        assert place.parent == tmp_path / "cache" / "folders"
        assert {path.name: path.read_bytes() for path in place.iterdir()} == files[spec]
        assert not any(path.is_symlink() for path in place.iterdir())
    again = run("org/big", "org/draft", "--route", "mlx", "--offline", **environment)
    assert again.stdout == done.stdout
    assert create_line(done)[2] == "big-dflash2"
