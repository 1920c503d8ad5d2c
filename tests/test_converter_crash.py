"""A conversion that is killed or runs out of room: the output is the whole new file, or what was there before."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from factories import make_drafter, make_target

from dflash2.converter import convert

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals, mounts and limits of POSIX")

# Kills itself at the moment named by the last argument: a share of the data written, or the n-th such system event.
KILLED = """
import os, signal, sys
from pathlib import Path
from dflash2.converter import convert

drafter, target, output = map(Path, sys.argv[1:4])
moment, number = sys.argv[4].split()

def die():
    os.kill(os.getpid(), signal.SIGKILL)

seen = 0
def watch(event, arguments):
    global seen
    if event == moment and str(output.name) in str(arguments[0]):
        seen += 1
        if seen == int(number):
            die()

def progress(done, total):
    if moment == "percent" and done * 100 >= total * int(number):
        die()

sys.addaudithook(watch)
convert(drafter, target, output, progress=progress)
die()
"""
# `open` 1 makes the temporary file, `open` 2 syncs it; `returned` is never seen, so the process dies at the end.
MOMENTS = {
    "open 1": b"old", "percent 0": b"old", "percent 20": b"old", "percent 40": b"old", "percent 60": b"old",
    "percent 80": b"old", "percent 100": b"old", "open 2": b"old", "os.rename 1": b"old", "returned 1": None,
}  # fmt: skip
CONVERT = """
import sys
from pathlib import Path
from dflash2.converter import convert
from dflash2.errors import OutputError
try:
    convert(*map(Path, sys.argv[1:4]))
except OutputError as error:
    print(error)
"""
LIMITED = """
import resource, signal, sys
limit = int(sys.argv.pop())
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
"""


@pytest.fixture
def target(tmp_path):
    return make_target(tmp_path / "target.gguf")


def run(script: str, *arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_conversion_leaves_the_old_output_or_the_whole_new_one(tmp_path, target, moment):
    drafter, output, whole = make_drafter(tmp_path / "drafter"), tmp_path / "out.gguf", tmp_path / "whole.gguf"
    convert(drafter, target, whole)
    output.write_bytes(b"old")
    assert run(KILLED, drafter, target, output, moment).returncode == -signal.SIGKILL
    assert output.read_bytes() == (MOMENTS[moment] or whole.read_bytes())


def test_killed_conversion_leaves_no_output_where_none_was(tmp_path, target):
    output = tmp_path / "out.gguf"
    run(KILLED, make_drafter(tmp_path / "drafter"), target, output, "percent 50")
    assert not output.exists()


@pytest.mark.parametrize("limit", [100, 20_000, 200_000])
def test_file_size_limit_is_one_sentence_and_leaves_nothing(tmp_path, target, limit):
    output = tmp_path / "out.gguf"
    result = run(LIMITED + CONVERT, make_drafter(tmp_path / "drafter"), target, output, limit)
    assert result.stdout == f"Cannot write {output}: File too large.\n"
    assert [path.name for path in tmp_path.glob("*out.gguf*")] == []


@pytest.mark.parametrize("old", [None, b"old"])
def test_full_disk_is_one_sentence_and_leaves_what_was_there(tmp_path, target, old):
    """A real file system of 100 kB, mounted for one process."""
    if not shutil.which("unshare") or subprocess.run(["unshare", "-rm", "true"], check=False).returncode:
        pytest.skip("needs permission to mount a file system in a namespace of its own")
    drafter, disk = make_drafter(tmp_path / "drafter"), tmp_path / "disk"
    disk.mkdir()
    output = disk / "out.gguf"
    script = tmp_path / "convert.py"
    script.write_text(CONVERT)
    before = f"printf %s {old.decode()} > {output}; " if old else ""
    steps = (
        f"mount -t tmpfs -o size=100k tmpfs {disk}; {before}"
        f"{sys.executable} {script} {drafter} {target} {output}; ls -A {disk}; cat {output} 2>&1 || true"
    )
    result = subprocess.run(["unshare", "-rm", "sh", "-ec", steps], capture_output=True, text=True, check=True)
    sentence, *rest = result.stdout.splitlines()
    assert sentence == f"Cannot write {output}: No space left on device."
    assert rest == (["out.gguf", "old"] if old else [f"cat: {output}: No such file or directory"])


def test_folder_that_cannot_be_written_is_one_sentence(tmp_path, target):
    drafter, folder = make_drafter(tmp_path / "drafter"), tmp_path / "readonly"
    folder.mkdir(mode=0o555)
    if os.access(folder, os.W_OK):
        folder = Path("/proc/self")  # root may write anywhere but here
    result = run(CONVERT, drafter, target, folder / "out.gguf")
    assert result.stdout.startswith(f"Cannot write {folder}/out.gguf: ")
    assert result.stderr == ""
