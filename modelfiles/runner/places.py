"""Where an Ollama keeps its `llama-server`, and what we put beside it."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

from dflash2.errors import RunnerError

_SERVER = "llama-server"
_MAC_APP = Path("/Applications/Ollama.app/Contents/Resources/ollama")
_GO_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
_VERSION_SECONDS = 20


class Places:
    """The files of one installation, of which none need be there.

    Attributes:
        folder: Ollama's folder of libraries, without symbolic links: one folder has one state, whatever it is called.
        program: the `llama-server` that Ollama runs.
        original: where Ollama's own is kept while the dispatcher is at `program`.
        partial: a file that is being written.
        state: folder of our server and of the record, beside Ollama's, whose installer empties its own.
        record: what an installation noted.
    """

    def __init__(self, folder: Path):
        self.folder = folder.resolve()
        self.program = self.folder / _SERVER
        self.original = self.folder / f"{_SERVER}.ollama"
        self.partial = self.folder / f"{_SERVER}.dflash2-partial"
        self.state = self.folder.with_name(f"{self.folder.name}.dflash2")
        self.record = self.state / "record.json"


def find_folder(executable: Path | None = None) -> Path:
    """Folder where the Ollama program `executable` looks for `llama-server`, by default the one on PATH.

    Raises RunnerError if there is no such program, or if it has no `llama-server` in any folder that is known.
    """
    if executable is None:
        on_path = shutil.which("ollama")
        if on_path is None and not _MAC_APP.exists():
            raise RunnerError(
                "There is no ollama on PATH; install it, or give the folder of its llama-server with --folder."
            )
        executable = Path(on_path) if on_path else _MAC_APP
    folders = _folders(executable.resolve().parent, Path.cwd())
    for folder in folders:
        # A folder whose llama-server is gone still counts if we were there.
        if os.path.lexists(folder / _SERVER) or Places(folder).record.exists():
            return folder
    version = ollama_version(executable)
    raise RunnerError(
        f"Ollama {version or 'of an unknown version'} at {executable} keeps no llama-server where this version of "
        f"dflash2 looks for it ({', '.join(map(str, folders))}); it is older or newer than is known here, or its "
        "folder has to be given with --folder."
    )


def _folders(beside: Path, working: Path) -> list[Path]:
    """In Ollama's own order; `beside` is the folder of its executable."""
    machine = platform.machine()
    target = f"{sys.platform}-{_GO_MACHINES.get(machine, machine)}"
    mac = [beside, beside / "lib" / "ollama"] if sys.platform == "darwin" else []
    built = [base / where / "lib" / "ollama" for base in (beside, working) for where in ("build", f"dist/{target}")]
    return [*mac, beside.parent / "lib" / "ollama", *built]


def ollama_version(executable: Path | None = None) -> str:
    """Version of an Ollama program (default: the one on PATH), empty if it cannot be had; no server need run."""
    program = executable or shutil.which("ollama")
    if program is None:
        return ""
    try:
        result = subprocess.run(
            [str(program), "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
            timeout=_VERSION_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    versions: list[str] = re.findall(r"version is (\S+)", result.stdout + result.stderr)
    # A running server's version comes first, the program's own, if it is another, last.
    return versions[-1] if versions else ""
