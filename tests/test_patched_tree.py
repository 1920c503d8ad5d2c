"""Trees that are patched by several processes at once, lose their state, or move on to another commit."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from test_cli import run
from test_series import SERIES, contents, copy_of_tree

from dflash2.constants import LLAMA_CPP_COMMIT, SECOND_BASE
from dflash2.errors import PatchError
from dflash2.patches import apply, remove, status

STATE = Path(".dflash2-patches")
TOUCHED = SERIES.touched[0]


@pytest.fixture
def tree(tmp_path) -> Path:
    return copy_of_tree(LLAMA_CPP_COMMIT, tmp_path / "llama.cpp")


@pytest.fixture
def checkout(tree) -> Path:
    """The tree as a checkout of git, with its files committed."""
    git(tree, "init", "-q")
    commit(tree)
    return tree


def git(tree: Path, *arguments: str) -> None:
    subprocess.run(["git", "-C", tree, "-c", "user.name=a", "-c", "user.email=a@b", *arguments], check=True)


def commit(tree: Path) -> None:
    git(tree, "add", ".")
    git(tree, "commit", "-qm", "x")


def source_files(tree: Path) -> dict[str, bytes]:
    """All of the tree but git's own."""
    return {name: content for name, content in contents(tree).items() if not name.startswith(".git/")}


def one_error(result) -> str:
    """The one sentence that a command failed with."""
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.splitlines()) == 1
    return result.stderr


def test_processes_that_patch_one_tree_wait_for_each_other(tree):
    before = contents(tree)
    program = "import sys, pathlib; from dflash2.patches import apply, remove\n"
    program += "for call in (apply, remove, apply): call(pathlib.Path(sys.argv[1]))"
    processes = [subprocess.Popen([sys.executable, "-c", program, tree], stderr=subprocess.PIPE) for _ in range(4)]
    said = [process.communicate()[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, said
    assert status(tree).patched
    remove(tree)
    assert contents(tree) == before


def test_an_original_that_was_spoilt_is_not_put_back(tree):
    apply(tree)
    (tree / STATE / "original" / TOUCHED).write_text("bad")
    patched = contents(tree)
    for call in (lambda: remove(tree), lambda: apply(tree, SERIES.only("backend"))):
        with pytest.raises(PatchError, match=f"original/{TOUCHED} is not what {TOUCHED} was before"):
            call()
        assert contents(tree) == patched


def test_an_original_that_was_spoilt_does_not_matter_once_the_file_is_there_again(tree):
    before = contents(tree)
    apply(tree)
    (tree / STATE / "original" / TOUCHED).unlink()
    (tree / TOUCHED).write_bytes(before[TOUCHED])
    remove(tree)
    assert contents(tree) == before


def test_a_checkout_that_moved_to_an_unknown_commit_is_named_and_cleaned(checkout):
    apply(checkout)
    git(checkout, "checkout", "-q", ".")
    version = checkout / "ggml" / "CMakeLists.txt"
    version.write_text(version.read_text().replace("GGML_VERSION_MINOR 25", "GGML_VERSION_MINOR 99"))
    (checkout / TOUCHED).write_text("another\n")
    git(checkout, "commit", "-qam", "x")
    git(checkout, "tag", "b99999")
    result = run("dflash2", "patch", checkout, "--status")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("llama.cpp b99999 (ggml 0.99.3): not patched any more")
    said = one_error(run("dflash2", "patch", checkout))
    assert "holds llama.cpp b99999 (ggml 0.99.3), which is no base of the patches" in said
    assert f"`dflash2 patch {checkout} --remove` takes away what is left" in said
    result = run("dflash2", "patch", checkout, "--remove")
    assert (result.returncode, result.stdout) == (0, "llama.cpp b99999 (ggml 0.99.3): not patched\n"), result.stderr
    assert not [name for name in source_files(checkout) if "dflash2" in name]
    assert (checkout / TOUCHED).read_text() == "another\n"


def test_a_checkout_that_moved_to_the_other_base_is_patched_there(checkout, tmp_path):
    apply(checkout)
    git(checkout, "checkout", "-q", ".")
    shutil.copytree(copy_of_tree(SECOND_BASE, tmp_path / "second"), checkout, dirs_exist_ok=True)
    moved = {name: content for name, content in source_files(checkout).items() if "dflash2" not in name}
    assert status(checkout).base == SECOND_BASE
    assert apply(checkout).name == SECOND_BASE
    remove(checkout)
    assert source_files(checkout) == moved


def test_a_file_of_our_name_that_is_not_ours_stays_when_the_rest_goes(checkout):
    apply(checkout)
    git(checkout, "checkout", "-q", ".")
    (checkout / TOUCHED).write_text("another\n")
    (checkout / SERIES.sources[0]).write_text("mine")
    remove(checkout)
    assert [name for name in source_files(checkout) if "dflash2" in name] == [SERIES.sources[0]]


def valid_state(**changes) -> dict:
    return {"base": "b1", "series": "0", "before": {}, "after": {}, "added": {}, **changes}


BROKEN = {
    "half": "{",
    "empty": "",
    "other bytes": b"\xff\xfe",
    "deep": "[" * 100_000,
    "list": "[]",
    "number": "1",
    "one field": '{"base": "zzz"}',
    "more fields": json.dumps(valid_state(more={})),
    "base is none": json.dumps(valid_state(base=None)),
    "table is a list": json.dumps(valid_state(added=[])),
    "digest is a number": json.dumps(valid_state(added={"a": 1})),
    "before without after": json.dumps(valid_state(before={"a": "0"})),
    "above the tree": json.dumps(valid_state(added={"../victim.txt": "0"})),
    "hidden above": json.dumps(valid_state(added={"src/../../victim.txt": "0"})),
    "absolute": json.dumps(valid_state(before={"/victim.txt": "0"}, after={"/victim.txt": "1"})),
    "backslashes": json.dumps(valid_state(added={"..\\victim.txt": "0"})),
    "drive": json.dumps(valid_state(added={"c:victim.txt": "0"})),
    "the tree itself": json.dumps(valid_state(added={"": "0"})),
    "the state": json.dumps(valid_state(added={f"{STATE}/state.json": "0"})),
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_a_state_that_is_none_of_ours_is_refused(tree, text):
    (tree / STATE).mkdir()
    (tree / STATE / "state.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    before = contents(tree)
    for call in (status, apply, remove):
        with pytest.raises(PatchError, match=r"state\.json is not what `dflash2 patch` writes"):
            call(tree)
    assert contents(tree) == before


def test_a_state_cannot_name_a_file_outside_the_tree(tree):
    victim = tree.parent / "victim.txt"
    victim.write_text("")
    digest = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    (tree / STATE).mkdir()
    (tree / STATE / "state.json").write_text(json.dumps(valid_state(added={"../victim.txt": digest})))
    for option in ("--remove", "--status"):
        assert "is not what `dflash2 patch` writes" in one_error(run("dflash2", "patch", tree, option))
    assert victim.exists()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("n_files", [0, 1, 2, 30, 45])
def test_a_call_that_is_killed_leaves_nothing_that_the_next_does_not_take_away(tree, n_files):
    """Killed while it writes the file after `n_files`, before and after the state is there."""
    before = contents(tree)
    child = os.fork()
    if child == 0:
        written = 0

        def end(event, arguments):
            nonlocal written
            if event == "open" and str(arguments[0]).endswith("partial") and arguments[2] & os.O_WRONLY:
                written += 1
                if written > n_files:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(end)
        apply(tree)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    status(tree)
    remove(tree)
    assert contents(tree) == before


def test_copies_without_a_state_are_kept_while_the_tree_is_patched(tree):
    apply(tree)
    (tree / STATE / "state.json").unlink()
    patched = contents(tree)
    with pytest.raises(PatchError, match="is no base of the patches"):
        remove(tree)
    assert contents(tree) == patched
