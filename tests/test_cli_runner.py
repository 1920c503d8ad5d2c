"""`dflash2 ollama runner` as a user runs it, and where it looks for Ollama."""

import os
import platform
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from fake_ollama import fake_ollama, snapshot, witness
from test_cli import BIN, run

from dflash2.builds import server_builds
from dflash2.errors import RunnerError
from dflash2.modelfiles.runner import find_folder, install, ollama_version


def with_ollama(prefix: Path) -> dict[str, str]:
    """An environment whose PATH has the Ollama of `prefix`."""
    return {**os.environ, "PATH": f"{prefix / 'bin'}:{os.environ['PATH']}"}


@pytest.fixture
def prefix(tmp_path):
    fake_ollama(tmp_path / "prefix")
    return tmp_path / "prefix"


def rows(output: str) -> dict[str, str]:
    return {line[:16].strip(): line[18:] for line in output.splitlines() if line[16:18] == "  "}


def test_install_status_and_restore_of_the_ollama_on_path(prefix, patched):
    folder, env = prefix / "lib" / "ollama", with_ollama(prefix)
    before = snapshot(prefix)
    asked = run("dflash2", "ollama", "runner", "status", env=env)
    assert asked.returncode == 0, asked.stderr
    assert rows(asked.stdout)["state"] == "not installed"

    assert patched.key in {build.key for build in server_builds()}
    planned = run("dflash2", "ollama", "runner", "install", "--dry-run", env=env)
    assert (planned.returncode, planned.stdout) == (0, "")
    assert f"copy {server_builds()[0].server} to {prefix}/lib/ollama.dflash2/server-" in planned.stderr
    assert snapshot(prefix) == before

    done = run("dflash2", "ollama", "runner", "install", env=env)
    assert done.returncode == 0, done.stderr
    assert done.stderr == planned.stderr
    told = rows(done.stdout)
    assert told["folder"] == str(folder)
    assert told["state"] == "installed"
    assert told["Ollama's server"] == f"{folder}/llama-server.ollama"
    assert told["drafting server"].startswith(f"{prefix}/lib/ollama.dflash2/server-")
    assert "+dflash2." in told["drafting server"]
    assert told["installed for"] == "Ollama 0.33.0"
    assert rows(run("dflash2", "ollama", "runner", "status", env=env).stdout) == told

    undone = run("dflash2", "ollama", "runner", "restore", env=env)
    assert (undone.returncode, rows(undone.stdout)["state"]) == (0, "not installed"), undone.stderr
    assert snapshot(prefix) == before


def test_restoring_after_an_upgrade_says_what_stays(prefix, patched):
    folder = prefix / "lib" / "ollama"
    install(folder, patched.server)
    witness(folder / "new", "newer").replace(folder / "llama-server")
    assert rows(run("dflash2", "ollama", "runner", "status", "--folder", folder).stdout)["state"] == "upgraded"
    undone = run("dflash2", "ollama", "runner", "restore", "--folder", folder)
    assert undone.returncode == 0, undone.stderr
    assert undone.stdout.startswith(
        "Ollama was upgraded: its new llama-server stays, and the old one that was kept goes.\n"
    )
    assert rows(undone.stdout)["state"] == "not installed"


def test_a_link_is_told_as_the_folder_behind_it(prefix, patched, tmp_path):
    (tmp_path / "link").symlink_to(prefix / "lib" / "ollama")
    install(prefix / "lib" / "ollama", patched.server)
    said = rows(run("dflash2", "ollama", "runner", "status", "--folder", tmp_path / "link").stdout)
    assert (said["folder"], said["state"]) == (str(prefix / "lib" / "ollama"), "installed")


def test_a_refused_server_is_one_sentence(prefix):
    result = run("dflash2", "ollama", "runner", "install", "--folder", prefix / "lib" / "ollama", "--server", "/bin/ls")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == (
        f"error: {Path('/bin/ls').resolve()} cannot stand in for Ollama's llama-server: it is no llama-server: it does "
        "not say its version; `dflash2 build --targets server` makes one for this machine.\n"
    )


def test_without_permission_the_whole_command_for_sudo_is_named(prefix, patched):
    folder = prefix / "lib" / "ollama"
    command = [BIN / "dflash2", "ollama", "runner", "install", "--folder", folder, "--server", patched.server]
    limited = []
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("root cannot give up its rights here: no setpriv")
        limited = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search,-fowner"]
        os.chown(folder.parent, 12345, 12345)
    folder.parent.chmod(0o555)
    result = subprocess.run([*limited, *command], capture_output=True, text=True, check=False)
    folder.parent.chmod(0o755)
    assert result.returncode == 1
    said, _, advice = result.stderr.splitlines()[-1].partition("; run: ")
    assert said == f"error: Cannot change {folder}.dflash2: Permission denied"
    assert shlex.split(advice) == ["sudo", *map(str, command)]


def test_without_an_ollama_the_folder_is_asked_for():
    result = run("dflash2", "ollama", "runner", "status", env={**os.environ, "PATH": "/nowhere"})
    assert result.returncode == 1
    assert result.stderr == (
        "error: There is no ollama on PATH; install it, or give the folder of its llama-server with --folder.\n"
    )


def test_without_a_build_it_says_how_to_make_one(prefix, tmp_path):
    env = {**with_ollama(prefix), "DFLASH2_CACHE": str(tmp_path / "empty")}
    result = run("dflash2", "ollama", "runner", "install", env=env)
    assert result.returncode == 1
    assert result.stderr == "error: There is no patched llama-server; `dflash2 build --targets server` makes one.\n"


@pytest.mark.parametrize("where", ["bin/../lib/ollama", "bin/build/lib/ollama", "bin/dist/{target}/lib/ollama"])
def test_ollamas_folders_are_those_of_its_executable_behind_links(tmp_path, where):
    target = f"linux-{ {'x86_64': 'amd64', 'aarch64': 'arm64'}[platform.machine()] }"
    folder = Path(os.path.normpath(tmp_path / "opt" / where.format(target=target)))
    folder.mkdir(parents=True)
    (tmp_path / "opt" / "bin").mkdir(exist_ok=True)
    ollama = witness(tmp_path / "opt" / "bin" / "ollama", "ollama")
    (tmp_path / "ollama").symlink_to(ollama)
    witness(folder / "llama-server", "original")
    assert find_folder(tmp_path / "ollama") == folder


def test_the_working_folder_counts_too_but_last(tmp_path, monkeypatch):
    built = tmp_path / "work" / "build" / "lib" / "ollama"
    built.mkdir(parents=True)
    witness(built / "llama-server", "built")
    monkeypatch.chdir(tmp_path / "work")
    (tmp_path / "prefix" / "bin").mkdir(parents=True)
    ollama = witness(tmp_path / "prefix" / "bin" / "ollama", "ollama")
    assert find_folder(ollama) == built
    ollama.unlink()
    (tmp_path / "prefix" / "bin").rmdir()
    installed = fake_ollama(tmp_path / "prefix")
    assert find_folder(tmp_path / "prefix" / "bin" / "ollama") == installed


def test_an_ollama_without_a_llama_server_is_named_with_its_version(prefix):
    (prefix / "lib" / "ollama" / "llama-server").unlink()
    ollama = prefix / "bin" / "ollama"
    with pytest.raises(
        RunnerError, match=rf"Ollama 0\.33\.0 at {ollama} keeps no llama-server .*{prefix}/lib/ollama, "
    ):
        find_folder(ollama)


@pytest.mark.parametrize(
    ("said", "version"),
    [
        ("ollama version is 0.33.0", "0.33.0"),
        (
            "Warning: could not connect to a running Ollama instance\nWarning: client version is 0.33.0-rc2",
            "0.33.0-rc2",
        ),
        ("ollama version is 0.32.1\nWarning: client version is 0.33.0", "0.33.0"),
        ("something else", ""),
    ],
)
def test_the_version_is_that_of_the_program(tmp_path, said, version):
    ollama = tmp_path / "ollama"
    ollama.write_text(f"#!/bin/sh\ncat <<'END'\n{said}\nEND\n")
    ollama.chmod(0o755)
    assert ollama_version(ollama) == version
