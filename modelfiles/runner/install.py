"""Putting the dispatcher in the place of Ollama's `llama-server`, and taking it away: at no moment is there none.

Every step is one rename, or is done beside what is in use, so that a call that dies leaves a folder which
`runner_status` understands and the next call completes.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dflash2.errors import RunnerError
from dflash2.modelfiles.runner.dispatcher import dispatcher, is_dispatcher
from dflash2.modelfiles.runner.places import Places
from dflash2.modelfiles.runner.record import Record, fingerprint, write_record
from dflash2.modelfiles.runner.server_copy import copy_path, copy_server, remove_other_copies
from dflash2.modelfiles.runner.status import RunnerStatus, runner_status
from dflash2.modelfiles.server_probe import ServerProbe, probe_server

# What Ollama starts its llama-server with.
_OPTIONS = (
    *(("--model", "model.gguf"), ("--port", "1"), ("--host", "127.0.0.1"), ("--no-webui",), ("--offline",)),
    *(("-c", "4096"), ("-np", "1"), ("--log-verbosity", "4"), ("--no-log-prefix",), ("--no-log-timestamps",)),
    *(("--flash-attn", "auto"), ("-b", "512"), ("-ub", "512"), ("--context-shift",), ("--load-mode", "mmap")),
)
_LOADER_VARIABLES = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "GGML_BACKEND_PATH")

Step = tuple[str, Callable[[], object]]


def install(
    folder: Path,
    server: Path,
    *,
    ollama_version: str = "",
    progress: Callable[[str], None] = lambda _step: None,
    dry_run: bool = False,
) -> RunnerStatus:
    """Have Ollama run DFlash drafting on a copy of `server`; done again, it brings an installation up to date.

    Args:
        folder: Ollama's folder of libraries, with its `llama-server`.
        server: a `llama-server` that knows DFlash 2; it is run first, and copied with llama.cpp's libraries beside it.
        ollama_version: for the record.
        progress: called with each step, in words, before it is done.
        dry_run: only call `progress`.

    Returns how the folder stands afterwards. Raises RunnerError if `server` is not fit, if Ollama's own is not there,
    or if the folder cannot be written to; nothing of Ollama's was changed then.
    """
    places, server = _places(folder), server.resolve()
    with _system_errors(places), _locked(places):
        original = _original(places)
        probe = _fit(server)
        copy = copy_path(server, places.state)
        script = dispatcher(places.program, places.original, copy)
        record = Record(
            original=fingerprint(original),
            dispatcher=hashlib.sha256(script).hexdigest(),
            server=str(copy),
            server_version=probe.version,
            ollama_version=ollama_version,
        )
        steps: list[Step] = [
            (f"copy {server} to {copy.parent}", lambda: _copy(server, copy, places)),
            (f"note the installation in {places.record}", lambda: write_record(places.record, record)),
            (
                f"keep Ollama's own llama-server as {places.original}",
                lambda: _name_too(original, places.original, places),
            ),
            (f"put the dispatcher in its place, {places.program}", lambda: _replace(places, script)),
            ("remove what an earlier installation left", lambda: remove_other_copies(places.state, copy)),
        ]
        _take(steps, progress, dry_run)
        return runner_status(places.folder)


def restore(
    folder: Path, *, progress: Callable[[str], None] = lambda _step: None, dry_run: bool = False
) -> RunnerStatus:
    """Put Ollama's own llama-server back, the same file as before, and remove what is ours.

    Where Ollama was upgraded its new llama-server stays and the kept one goes. Arguments and result as for `install`.
    Raises RunnerError if Ollama's own is lost or the folder cannot be written to.
    """
    places = _places(folder)
    with _system_errors(places), _locked(places):
        before = runner_status(places.folder)
        if before.state == "broken":
            raise RunnerError(before.message)
        steps: list[Step] = []
        if before.original == places.original:
            words = f"put Ollama's own llama-server back, {places.program}"
            steps.append((words, lambda: _name_too(places.original, places.program, places)))
        if any(map(os.path.lexists, (places.original, places.partial, places.state))):
            steps.append((f"remove {places.state} and what else is left", lambda: _remove_ours(places)))
        _take(steps, progress, dry_run)
        return runner_status(places.folder)


def _places(folder: Path) -> Places:
    if sys.platform == "win32":
        raise RunnerError("The runner is not supported on Windows: a script cannot stand in for llama-server.exe.")
    if not folder.is_dir():
        raise RunnerError(f"{folder} is no folder; give the one that holds Ollama's llama-server.")
    return Places(folder)


def _take(steps: list[Step], progress: Callable[[str], None], dry_run: bool) -> None:
    for words, action in steps:
        progress(words)
        if not dry_run:
            action()


def _original(places: Places) -> Path:
    """Ollama's own llama-server as it lies now."""
    before = runner_status(places.folder)
    lost = before.original == places.original and not is_dispatcher(places.program)
    if before.original is None or lost:
        raise RunnerError(before.message)
    if not os.access(before.original, os.X_OK) or before.original.is_dir():
        raise RunnerError(f"{before.original} is no program that can be run; install Ollama again.")
    return before.original


def _fit(server: Path) -> ServerProbe:
    """What `server` showed when run with nothing but its own libraries; it does all that Ollama asks of one."""
    if is_dispatcher(server):
        raise RunnerError(f"{server} is a dispatcher, not a server; give the server that it is to run.")
    environment = {name: value for name, value in os.environ.items() if name not in _LOADER_VARIABLES}
    probe = probe_server(server, _OPTIONS, environment)
    if not probe.dflash2:
        raise RunnerError(
            f"{server} cannot stand in for Ollama's llama-server: it {probe.reason}; `dflash2 build --targets server` "
            "makes one for this machine."
        )
    return probe


def _copy(server: Path, copy: Path, places: Places) -> None:
    places.state.mkdir(exist_ok=True)
    places.state.chmod(0o755)
    copy_server(server, copy)
    try:
        _fit(copy)
    except RunnerError:
        shutil.rmtree(copy.parent)
        raise


def _name_too(path: Path, name: Path, places: Places) -> None:
    """Give a file a second name, in the place of what had it; owner, mode and time are those of the file."""
    if path == name:
        return
    places.partial.unlink(missing_ok=True)
    os.link(path, places.partial, follow_symlinks=False)
    places.partial.replace(name)
    places.partial.unlink(missing_ok=True)  # renaming one name of a file to another of it does nothing


def _replace(places: Places, script: bytes) -> None:
    """Put the script in the place of Ollama's own, with the owner and the mode of that."""
    places.partial.unlink(missing_ok=True)
    places.partial.write_bytes(script)
    was = places.original.stat()
    # What may be run must be readable too, or the shell cannot read it.
    places.partial.chmod((was.st_mode | (was.st_mode & 0o111) << 2) & 0o777)
    with contextlib.suppress(PermissionError):
        os.chown(places.partial, was.st_uid, was.st_gid)
    with places.partial.open("rb") as file:
        os.fsync(file.fileno())
    places.partial.replace(places.program)


def _remove_ours(places: Places) -> None:
    if places.state.exists():
        shutil.rmtree(places.state)
    # Last, for a dispatcher that was starting when its place was taken.
    for path in (places.partial, places.original):
        path.unlink(missing_ok=True)


@contextmanager
def _locked(places: Places) -> Iterator[None]:
    """One call at a time for a folder; the folder itself is locked, so that nothing is left behind."""
    import fcntl  # Windows has none

    descriptor = os.open(places.folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _system_errors(places: Places) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        advice = "; the runner needs a folder that can be written to" if error.errno == errno.EROFS else ""
        message = f"Cannot change {error.filename or places.folder}: {error.strerror or error}{advice}."
        raise RunnerError(message) from error
