"""Which `llama-server` serves: the patched build, one on PATH that proves it can, or the one that is named."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash2.builds import server_builds
from dflash2.errors import ServerError
from dflash2.modelfiles.server_probe import probe_server

COUPLED = ("--spec-draft-verify", "coupled")
FIT_MARGIN = "--fit-target"
_RUN_SECONDS = 60  # a GPU's driver may take its time
_NO_RPC = "RPC not supported"


@dataclass(frozen=True)
class ServerProgram:
    """A `llama-server` that runs DFlash 2 drafters.

    Attributes:
        path: the program.
        origin: what it is, for the user: "patched build, cuda", "on PATH", "as given".
        patched: whether it is a build of ours.
        couples: whether it can verify sampled drafts by shared noise.
        fits: whether it can keep memory of the devices free for the drafter.
    """

    path: Path
    origin: str
    patched: bool
    couples: bool
    fits: bool


def find_server(given: Path | None = None, *, rpc: bool = False) -> ServerProgram:
    """The program to serve with, which can use other machines' devices if `rpc`.

    A patched build is known; `given` and what PATH has are run on the demo pair first. Raises ServerError with what to
    do if there is none.
    """
    if given is not None:
        return _proved(_as_program(given), "as given", rpc=rpc)
    builds = server_builds(("rpc",) if rpc else ())
    if builds:
        origin = f"patched build, {builds[0].backend}"
        return ServerProgram(builds[0].server, origin, patched=True, couples=True, fits=True)
    advice = f"`dflash2 build --targets {'libs,server,rpc' if rpc else 'libs,server'}` makes one"
    on_path = shutil.which("llama-server")
    if on_path is None:
        patched = " with RPC" if rpc else ""
        raise ServerError(f"there is no patched llama-server{patched} in the cache and none on PATH; {advice}.")
    try:
        return _proved(Path(on_path), "on PATH", rpc=rpc)
    except ServerError as error:
        raise ServerError(f"{str(error).removesuffix('.')}; {advice}.") from error


def _as_program(given: Path) -> Path:
    found = shutil.which(given)
    if found is None:
        raise ServerError(f"{given} is no program that can be run; give the path of a llama-server.")
    return Path(found).absolute()


def _proved(program: Path, origin: str, *, rpc: bool) -> ServerProgram:
    probe = probe_server(program)
    if not probe.dflash2:
        raise ServerError(f"{program} ({origin}) cannot run DFlash 2 drafters: it {probe.reason}.")
    if rpc and _NO_RPC in _run(program, ("--rpc", "")).stdout:
        raise ServerError(f"{program} ({origin}) was built without RPC.")
    couples, fits = (_accepts(program, option) for option in (COUPLED, (FIT_MARGIN, "1024")))
    return ServerProgram(program, origin, patched=False, couples=couples, fits=fits)


def _accepts(program: Path, option: Sequence[str]) -> bool:
    return _run(program, option).returncode == 0


def _run(program: Path, options: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """A run that reads `options` and ends; its `stdout` is all that it said."""
    try:
        return subprocess.run(
            [str(program), *options, "--list-devices"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            check=False,
            timeout=_RUN_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ServerError(f"{program} cannot be run: {error}.") from error
