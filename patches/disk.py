"""Errors of the disk in one sentence: what could not be written, and why."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dflash2.errors import BuildError


@contextmanager
def writing(folder: Path, error: type[BuildError] = BuildError) -> Iterator[None]:
    """Raise `error`, naming `folder`, for an OSError within."""
    try:
        yield
    except BrokenPipeError:
        raise  # of who reads our output, not of the disk
    except OSError as cause:
        raise error(f"{folder} cannot be written: {_reason(cause)}.") from cause


def _reason(cause: OSError) -> str:
    """What copying a tree raises has neither file nor words but a list of both, one for each file."""
    if isinstance(cause, shutil.Error) and isinstance(cause.args[0], list):
        _, copy, reason = cause.args[0][0]
        return f"{reason} ({copy})"
    reason = cause.strerror or str(cause)
    return reason if cause.filename is None else f"{reason} ({cause.filename})"
