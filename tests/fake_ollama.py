"""An Ollama's files as far as the runner sees them, with programs in them that say how they were started."""

import json
import os
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

# Python itself leaves arguments, environment and process as they came.
_WITNESS = """#!{python} -IS
import json, os, sys
print(json.dumps({{
    "who": {who!r},
    "pid": os.getpid(),
    "arguments": [os.fsencode(word).hex() for word in sys.argv[1:]],
    "environment": {{name.hex(): value.hex() for name, value in os.environb.items()}},
}}), flush=True)
if "--die" in sys.argv:
    os.kill(os.getpid(), 15)
sys.exit(7)
"""


def witness(path: Path, who: str) -> Path:
    """Make `path` a program that prints how it was started and exits with status 7, or by SIGTERM if told to --die."""
    path.write_text(_WITNESS.format(python=sys.executable, who=who))
    path.chmod(0o755)
    return path


@dataclass(frozen=True)
class Testimony:
    """How a program was started."""

    who: str
    same_process: bool
    arguments: list[bytes]
    environment: dict[bytes, bytes]
    status: int
    errors: str


def started(*command, env=None) -> Testimony:
    """Run a command that ends in a witness."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env)
    output, errors = process.communicate(timeout=60)
    told = json.loads(output)
    environment = {bytes.fromhex(name): bytes.fromhex(value) for name, value in told["environment"].items()}
    arguments = [bytes.fromhex(word) for word in told["arguments"]]
    same = told["pid"] == process.pid
    return Testimony(told["who"], same, arguments, environment, process.returncode, errors.decode())


def snapshot(folder: Path) -> dict[str, tuple]:
    """All that is below `folder`: kind, mode, owner, time and contents of each file."""
    found = {}
    for path in sorted(folder.rglob("*")):
        info = path.lstat()
        what = path.readlink() if path.is_symlink() else path.read_bytes() if path.is_file() else None
        owner = (info.st_uid, info.st_gid)
        time = None if stat.S_ISDIR(info.st_mode) else info.st_mtime_ns
        found[str(path.relative_to(folder))] = (stat.filemode(info.st_mode), owner, time, what)
    return found


def fake_ollama(prefix: Path, version: str = "0.33.0") -> Path:
    """Ollama below `prefix`; its llama-server is a witness. Returns the folder where it looks for that."""
    (prefix / "bin").mkdir(parents=True)
    ollama = prefix / "bin" / "ollama"
    ollama.write_text(
        f"#!/bin/sh\necho 'Warning: could not connect to a running Ollama instance'\n"
        f"echo 'Warning: client version is {version}'\n"
    )
    ollama.chmod(0o755)
    folder = prefix / "lib" / "ollama"
    folder.mkdir(parents=True)
    witness(folder / "llama-server", "original")
    os.utime(folder / "llama-server", ns=(1_600_000_000_123_456_789, 1_600_000_000_123_456_789))
    (folder / "llama-server").chmod(0o750)
    witness(folder / "llama-quantize", "quantize")
    return folder
