"""The runner in a folder like Ollama's: installed, upgraded over, interrupted, undone."""

import hashlib
import os
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from fake_ollama import fake_ollama, snapshot, started, witness
from llama_server import LlamaServer

from dflash2.errors import RunnerError
from dflash2.modelfiles.runner import install, restore, runner_status
from dflash2.patches import build

DRAFTING = ("--spec-type", "draft-dflash")
# As Ollama starts a model with a drafter, but for the port, which LlamaServer gives.
OLLAMA = (
    *("--no-webui", "-c", "512", "-np", "1", "--log-verbosity", "4", "--no-log-prefix", "--no-log-timestamps"),
    *("--flash-attn", "auto", "-b", "512", "-ub", "512", "--context-shift", "--load-mode", "mmap"),
)
# Ends itself with SIGKILL before the step of that number, so that no handler and no `finally` runs.
KILLED = """
import os, signal, sys
from pathlib import Path
from dflash2.modelfiles import runner

left = int(sys.argv[1])

def progress(_step):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)

getattr(runner, sys.argv[2])(*map(Path, sys.argv[3:]), progress=progress)
"""
STEPS = {"install": 5, "restore": 2}


@pytest.fixture
def folder(tmp_path):
    return fake_ollama(tmp_path / "prefix")


@pytest.fixture
def server(patched, tmp_path):
    """A small file that is the patched server, so that a copy costs nothing."""
    return small_server(tmp_path / "server", patched)


def small_server(folder: Path, patched, remark: str = "") -> Path:
    folder.mkdir()
    path = folder / "llama-server"
    path.write_text(f'#!/bin/sh\n# {remark}\nexec "{patched.server}" "$@"\n')
    path.chmod(0o755)
    return path


def who(folder: Path, *words: str) -> str:
    return started(folder / "llama-server", *words).who


def version(folder: Path, *words: str) -> str:
    command = [folder / "llama-server", *words, "--version"]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True).stdout


def killed_before(step: int, verb: str, *arguments: Path) -> bool:
    """Whether the call was killed there; it had fewer steps otherwise, and ended well."""
    command = [sys.executable, "-c", KILLED, str(step), verb, *map(str, arguments)]
    status = subprocess.run(command, check=False).returncode
    assert status in (0, -9)
    return status == -9


def test_ollamas_flags_and_environment_reach_a_server_that_drafts(
    patched, target_path, drafter_gguf, prompts, tmp_path
):
    stock = build(stock=True, targets=("server",)).libraries
    folder = fake_ollama(tmp_path / "prefix")
    shutil.copytree(stock, folder, symlinks=True, dirs_exist_ok=True)
    broken = tmp_path / "broken"
    broken.mkdir()
    for library in stock.glob("*.so*"):
        (broken / library.name).write_bytes(b"no library")
    environment = {
        "LD_LIBRARY_PATH": f"{folder}:{folder}/cuda_v13:{broken}",
        "GGML_BACKEND_PATH": str(broken / "libggml-cpu.so"),
        "PATH": f"{folder}:{os.environ['PATH']}",
    }
    polluted = {**os.environ, **environment, "LD_LIBRARY_PATH": str(broken)}
    assert subprocess.run([patched.server, "--version"], env=polluted, capture_output=True, check=False).returncode != 0

    after = install(folder, patched.server, ollama_version="0.33.0")
    assert (after.state, after.ollama_version) == ("installed", "0.33.0")
    assert after.server_version.endswith(f"+dflash2.{patched.series[:8]})")
    # The build may go: what runs is a copy.
    assert not after.server.is_relative_to(patched.folder)

    drafting = ("--spec-draft-n-max", "7", "--spec-draft-model", str(drafter_gguf))
    arguments = ["--model", str(target_path), *OLLAMA, *DRAFTING, *drafting]
    with LlamaServer(folder / "llama-server", arguments, tmp_path / "log", environment) as running:
        with urllib.request.urlopen(f"{running.url}/health", timeout=60) as response:
            assert response.status == 200
        timings = running.post("/completion", {"prompt": prompts[0], "n_predict": 48, "temperature": 0})["timings"]
        assert timings["draft_n_accepted"] > 0
        # Only the patched server tells the accepted length.
        assert timings["accepted_length"] > 1
    assert version(folder).startswith("version: 0.5.0-dev")
    assert "dflash2" not in version(folder)
    with LlamaServer(folder / "llama-server", ["--model", str(target_path), *OLLAMA], tmp_path / "log-plain") as plain:
        timings = plain.post("/completion", {"prompt": prompts[0], "n_predict": 8, "temperature": 0})["timings"]
        assert "draft_n" not in timings


def test_installed_then_restored_is_byte_for_byte_as_before(folder, server):
    before, inode = snapshot(folder.parent), (folder / "llama-server").stat().st_ino
    assert runner_status(folder).state == "not installed"
    after = install(folder, server)
    assert (after.state, after.original) == ("installed", folder / "llama-server.ollama")
    assert runner_status(folder) == after
    assert who(folder, "--list-devices") == "original"
    assert "+dflash2." in version(folder, *DRAFTING)
    mode = (folder / "llama-server").stat().st_mode & 0o777
    assert mode == 0o750  # the original's, and readable to all who may run it
    assert restore(folder).state == "not installed"
    assert snapshot(folder.parent) == before
    assert (folder / "llama-server").stat().st_ino == inode
    assert restore(folder).state == "not installed"
    assert snapshot(folder.parent) == before


def test_installing_again_changes_nothing(folder, server):
    install(folder, server)
    (folder / "llama-server").touch()
    before = {name: (mode, owner, what) for name, (mode, owner, _, what) in snapshot(folder.parent).items()}
    assert install(folder, server).state == "installed"
    assert {name: (mode, owner, what) for name, (mode, owner, _, what) in snapshot(folder.parent).items()} == before


def test_another_server_takes_the_place_of_the_first(folder, server, patched, tmp_path):
    first = install(folder, server).server
    second = install(folder, small_server(tmp_path / "other", patched, "other"), ollama_version="0.34.0")
    assert (second.state, second.ollama_version) == ("installed", "0.34.0")
    assert second.server.read_text() != server.read_text()
    assert not first.exists()
    assert [path.name for path in second.server.parent.parent.glob("server-*")] == [second.server.parent.name]


def test_a_dry_run_tells_the_steps_and_takes_none(folder, server):
    before, told = snapshot(folder.parent), []
    assert install(folder, server, progress=told.append, dry_run=True).state == "not installed"
    assert len(told) == STEPS["install"]
    assert f"put the dispatcher in its place, {folder / 'llama-server'}" in told
    assert snapshot(folder.parent) == before
    install(folder, server)
    before, told = snapshot(folder.parent), []
    assert restore(folder, progress=told.append, dry_run=True).state == "installed"
    assert len(told) == STEPS["restore"]
    assert snapshot(folder.parent) == before


def upgraded_by_a_new_folder(folder):
    """As Ollama's installation script does it."""
    shutil.rmtree(folder)
    folder.mkdir()
    witness(folder / "llama-server", "newer")


def upgraded_by_a_new_file(folder):
    witness(folder / "new", "newer").replace(folder / "llama-server")


def upgraded_in_place(folder):
    witness(folder / "llama-server", "newer")


@pytest.mark.parametrize("upgrade", [upgraded_by_a_new_folder, upgraded_by_a_new_file, upgraded_in_place])
def test_an_upgrade_of_ollama_is_noticed_and_its_new_server_kept(folder, server, upgrade):
    old = install(folder, server)
    upgrade(folder)
    status = runner_status(folder)
    assert (status.state, status.original) == ("upgraded", folder / "llama-server")
    assert status.message == (
        "Ollama was upgraded and runs its own llama-server; run `dflash2 ollama runner install` again."
    )
    newer = (folder / "llama-server").read_bytes()
    after = install(folder, server)
    assert (after.state, after.server) == ("installed", old.server)
    assert (folder / "llama-server.ollama").read_bytes() == newer
    assert who(folder, "-c", "1") == "newer"
    assert restore(folder).state == "not installed"
    assert (folder / "llama-server").read_bytes() == newer


@pytest.mark.parametrize("upgrade", [upgraded_by_a_new_folder, upgraded_by_a_new_file, upgraded_in_place])
def test_restoring_never_puts_an_old_server_over_an_upgraded_one(folder, server, upgrade):
    install(folder, server)
    upgrade(folder)
    newer = (folder / "llama-server").read_bytes()
    assert restore(folder).state == "not installed"
    assert (folder / "llama-server").read_bytes() == newer
    assert not (folder / "llama-server.ollama").exists()
    assert [path.name for path in folder.parent.iterdir()] == ["ollama"]


def test_the_same_ollama_installed_again_is_no_upgrade(folder, server):
    own = (folder / "llama-server").read_bytes()
    install(folder, server)
    (folder / "llama-server.ollama").replace(folder / "llama-server")
    assert runner_status(folder).state == "interrupted"
    assert restore(folder).state == "not installed"
    assert (folder / "llama-server").read_bytes() == own


@pytest.mark.parametrize("step", range(1, STEPS["install"] + 1))
@pytest.mark.parametrize("then", ["install", "restore"])
@pytest.mark.parametrize("start", ["fresh", "upgraded", "installed"])
def test_a_call_killed_between_two_steps_leaves_what_the_next_one_completes(
    folder, server, patched, tmp_path, start, step, then
):
    own, given = "original", server
    before = snapshot(folder.parent)
    if start != "fresh":
        install(folder, server)
    if start == "upgraded":
        upgraded_by_a_new_file(folder)
        own = "newer"
    if start == "installed":
        given = small_server(tmp_path / "other", patched, "other")
    assert killed_before(step, "install", folder, given)
    assert who(folder, "-c", "1") == own
    assert runner_status(folder).state in (
        {"fresh": ("not installed", "interrupted"), "upgraded": ("upgraded", "interrupted")}.get(start, ("incomplete",))
        if step <= 4 and not (start == "installed" and step <= 2)
        else ("installed",)
    )
    if then == "install":
        assert install(folder, given).state == "installed"
        assert who(folder, "-c", "1") == own
    assert restore(folder).state == "not installed"
    assert who(folder) == own
    if start != "upgraded":
        assert snapshot(folder.parent) == before


@pytest.mark.parametrize("then", [install, restore])
def test_a_restore_that_was_killed_is_completed(folder, server, then):
    before = snapshot(folder.parent)
    for step in range(1, STEPS["restore"] + 1):
        install(folder, server)
        assert killed_before(step, "restore", folder)
        assert who(folder) == "original"
        assert runner_status(folder).state == ("installed" if step == 1 else "interrupted")
        if then is install:
            assert install(folder, server).state == "installed"
        restore(folder)
        assert snapshot(folder.parent) == before


def test_half_written_files_of_a_killed_call_go(folder, server):
    before = snapshot(folder.parent)
    state = folder.parent / "ollama.dflash2"
    for name in ("server-0123.partial", "server-4567"):
        (state / name).mkdir(parents=True)
    (state / "record.json.partial").write_text("{")
    (folder / "llama-server.dflash2-partial").write_text("#!/bin/")
    assert runner_status(folder).state == "not installed"
    after = install(folder, server)
    assert after.state == "installed"
    assert sorted(path.name for path in folder.iterdir()) == ["llama-quantize", "llama-server", "llama-server.ollama"]
    assert {path.name for path in state.iterdir()} == {"record.json", after.server.parent.name}
    (folder / "llama-server.dflash2-partial").write_text("#!/bin/")
    restore(folder)
    assert snapshot(folder.parent) == before


def test_calls_at_the_same_time_wait_for_each_other_and_ollama_always_has_its_server(folder, server):
    """A program proper, which is loaded when it is started; a script is opened by its name a moment later."""
    stock = build(stock=True, targets=("server",))
    shutil.copy(stock.server, folder / "llama-server")
    command = [folder / "llama-server", "--version"]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(stock.libraries)}
    calls = [("install", folder, server), ("restore", folder), ("install", folder, server), ("restore", folder)]
    running = [
        subprocess.Popen([sys.executable, "-c", KILLED, "0", *map(str, call)], stderr=subprocess.PIPE) for call in calls
    ]
    while any(process.poll() is None for process in running):
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
    assert [(process.returncode, process.stderr.read()) for process in running] == [(0, b"")] * 4
    assert runner_status(folder).state in ("installed", "not installed")
    assert restore(folder).state == "not installed"


def test_a_server_that_vanished_is_told_and_installed_again(folder, server):
    gone = install(folder, server).server
    shutil.rmtree(gone.parent)
    status = runner_status(folder)
    assert (status.state, status.message) == (
        "incomplete",
        f"The server that drafts, {gone}, is gone; run `dflash2 ollama runner install` again.",
    )
    assert who(folder, *DRAFTING) == "original"
    assert install(folder, server).state == "installed"


def test_a_lost_record_hinders_nothing(folder, server):
    before = snapshot(folder.parent)
    for then in (install, restore):
        install(folder, server)
        shutil.rmtree(folder.parent / "ollama.dflash2")
        assert runner_status(folder).state == "incomplete"
        if then is install:
            assert install(folder, server).state == "installed"
        restore(folder)
        assert snapshot(folder.parent) == before


def test_a_lost_or_changed_original_is_not_made_up_for(folder, server):
    install(folder, server)
    kept = folder / "llama-server.ollama"
    for spoil in (lambda: witness(kept, "somebody else's"), kept.unlink):
        spoil()
        status = runner_status(folder)
        assert (status.state, status.original) == ("broken", None)
        before = snapshot(folder.parent)
        for call in (lambda: restore(folder), lambda: install(folder, server)):
            with pytest.raises(RunnerError, match="install Ollama again"):
                call()
        assert snapshot(folder.parent) == before
    upgraded_by_a_new_folder(folder)
    assert install(folder, server).state == "installed"


def test_a_program_that_is_gone_is_put_back_from_what_was_kept(folder, server):
    install(folder, server)
    (folder / "llama-server").unlink()
    assert runner_status(folder).state == "interrupted"
    with pytest.raises(RunnerError, match="`dflash2 ollama runner restore` puts it back"):
        install(folder, server)
    assert restore(folder).state == "not installed"
    assert who(folder) == "original"


def test_a_link_to_the_folder_is_the_folder(folder, server, tmp_path):
    before = snapshot(folder.parent)
    link = tmp_path / "link"
    link.symlink_to(folder)
    assert install(link, server).folder == folder
    assert runner_status(folder).state == runner_status(link).state == "installed"
    assert not (tmp_path / "link.dflash2").exists()
    # Ollama's variables may name the link; a folder that is no link to Ollama's stays.
    other = tmp_path / "other"
    other.mkdir()
    environment = {**os.environ, "LD_LIBRARY_PATH": f"{link}:{link}/cuda_v13:{other}:{link}/."}
    (folder / "cuda_v13").mkdir()
    drafting = Path(runner_status(link).server)
    witness(drafting, "drafting")
    told = started(link / "llama-server", *DRAFTING, env=environment)
    assert told.who == "drafting"
    assert told.environment[b"LD_LIBRARY_PATH"] == os.fsencode(f"{drafting.parent}:{other}")
    (folder / "cuda_v13").rmdir()
    restore(link)
    assert snapshot(folder.parent) == before


def test_a_link_in_its_place_comes_back_as_a_link(folder, server, tmp_path):
    elsewhere = tmp_path / "cellar"
    elsewhere.mkdir()
    (folder / "llama-server").rename(elsewhere / "llama-server")
    (folder / "llama-server").symlink_to("../../../cellar/llama-server")
    before = snapshot(folder.parent)
    assert install(folder, server).state == "installed"
    assert who(folder, "-c", "1") == "original"
    assert snapshot(elsewhere)["llama-server"][3] == (elsewhere / "llama-server").read_bytes()
    # An upgrade behind the link is the link's affair.
    witness(elsewhere / "llama-server", "newer")
    assert runner_status(folder).state == "installed"
    assert who(folder) == "newer"
    assert restore(folder).state == "not installed"
    assert snapshot(folder.parent) == before


def test_a_server_that_cannot_do_what_ollama_asks_is_refused_and_nothing_changed(folder, server, patched, tmp_path):
    without_flags = small_server(tmp_path / "flags", patched)
    refusal = 'case "$*" in *--load-mode*) echo "error: invalid argument: --load-mode" >&2; exit 1;; esac'
    without_flags.write_text(f'#!/bin/sh\n{refusal}\nexec "{patched.server}" "$@"\n')
    alone = Path(shutil.copy(patched.server, tmp_path))
    foreign = tmp_path / "foreign"
    foreign.write_bytes(b"\x7fELF" + bytes(60))
    foreign.chmod(0o755)
    before = snapshot(folder.parent)
    for given, said in (
        (without_flags, "it does not know --load-mode;"),
        (alone, "it does not start: .*libllama-server-impl"),
        (foreign, "it cannot be run: Exec format error;"),
        (tmp_path / "none", "it cannot be run: No such file or directory;"),
        (folder / "llama-server", "it does not start"),
    ):
        with pytest.raises(RunnerError, match=f"cannot stand in for Ollama's llama-server: {said}"):
            install(folder, given)
    assert snapshot(folder.parent) == before
    install(folder, server)
    with pytest.raises(RunnerError, match="is a dispatcher, not a server"):
        install(folder, folder / "llama-server")


def test_a_server_that_needs_the_callers_environment_is_refused(folder, patched, tmp_path, monkeypatch):
    """Ollama's service does not have it."""
    alone = Path(shutil.copy(patched.server, tmp_path))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(patched.libraries))
    assert subprocess.run([alone, "--version"], capture_output=True, check=False).returncode == 0
    with pytest.raises(RunnerError, match="does not start"):
        install(folder, alone)


def test_a_folder_without_ollama_is_refused(server, tmp_path):
    with pytest.raises(RunnerError, match=f"There is no llama-server in {tmp_path}; install Ollama again"):
        install(tmp_path, server)
    assert runner_status(tmp_path).state == "absent"
    assert restore(tmp_path).state == "absent"
    with pytest.raises(RunnerError, match="none is no folder"):
        install(tmp_path / "none", server)
    (tmp_path / "llama-server").write_text("")
    with pytest.raises(RunnerError, match="is no program that can be run"):
        install(tmp_path, server)


def test_the_copy_holds_the_server_and_its_libraries_alone(folder, patched):
    copy = install(folder, patched.server).server.parent
    names = {path.name for path in copy.iterdir()}
    assert "llama-server" in names
    assert {path.name for path in patched.libraries.glob("lib*.so*")} == names - {"llama-server"}
    assert (copy / "libllama.so").is_symlink()
    for name in names:
        ours, theirs = (hashlib.sha256((where / name).read_bytes()).digest() for where in (copy, patched.libraries))
        assert ours == theirs
        assert (copy / name).stat().st_mode & 0o777 == 0o755
