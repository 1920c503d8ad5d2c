"""The programs `dflash2` and `dflash2-convert`: how a command is run and how it fails."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import threading
from types import FrameType

try:
    import click

    from dflash2 import __version__
    from dflash2.commands.analyze import analyze
    from dflash2.commands.bench import bench
    from dflash2.commands.command import command as engine_command
    from dflash2.commands.convert import convert
    from dflash2.commands.converter import check, inspect, list_pairs, upgrade
    from dflash2.commands.demo import demo
    from dflash2.commands.modelfile import modelfile
    from dflash2.commands.ollama import ollama
    from dflash2.commands.parity import parity
    from dflash2.commands.patches import build, doctor, patch
    from dflash2.commands.report import report
    from dflash2.commands.runtime import run
    from dflash2.commands.serve import serve
    from dflash2.commands.terminal import HELP, errors
    from dflash2.commands.verify import verify
    from dflash2.errors import Dflash2Error
except KeyboardInterrupt:  # what they import takes seconds on a slow machine
    sys.exit(130)


def _call(command: click.Command) -> None:
    """Run a command; an error of ours is shown as its one sentence and ends with status 1."""
    debug = "--debug" in sys.argv
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character is no reason to fail
    _exit_on_signals()
    try:
        command.main(standalone_mode=False)
    except Dflash2Error as error:
        if debug:
            raise
        errors.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        sys.exit(1)
    except BrokenPipeError:
        os._exit(141)  # as a program ended by SIGPIPE: the reader has seen enough
    except OSError as error:
        if debug:
            raise
        what = "cannot write the output" if error.filename is None else f"cannot use {error.filename}"
        with contextlib.suppress(OSError):
            errors.print(f"error: {what}: {error.strerror or error}", style="red", markup=False, soft_wrap=True)
        os._exit(1)  # the streams cannot be flushed any more
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        errors.print("aborted")
        sys.exit(130)


def _exit_on_signals() -> None:
    """End on SIGTERM and SIGHUP as on an error, so that no temporary file stays; what nohup ignores stays ignored."""

    def leave(number: int, _frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)  # once is enough: the exit is under way
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        return
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number is not None and signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, leave)


@click.group(context_settings=HELP)
@click.version_option(__version__, prog_name="dflash2")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def cli(debug: bool) -> None:
    """DFlash 2 speculative decoding for llama.cpp, llama-cpp-python and Ollama."""


# After a command's name too, where `dflash2-convert` has no other place for it.
_DEBUG = click.Option(["--debug"], is_flag=True, expose_value=False, help="Show the traceback of an error.")
for command in (
    convert,
    inspect,
    check,
    upgrade,
    list_pairs,
    run,
    serve,
    demo,
    verify,
    bench,
    analyze,
    parity,
    report,
    build,
    patch,
    doctor,
    engine_command,
    ollama,
    modelfile,
):
    command.params.append(_DEBUG)
    cli.add_command(command)
for command in (*ollama.commands.values(), *bench.commands.values()):
    command.params.append(_DEBUG)


def main() -> None:
    """Entry point of `dflash2`."""
    _call(cli)


def convert_main() -> None:
    """Entry point of `dflash2-convert`."""
    _call(convert)
