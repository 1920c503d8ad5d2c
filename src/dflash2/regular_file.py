"""Files that are files: what the system refuses of a path becomes a sentence, and no pipe is waited for."""

from __future__ import annotations

import errno
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path

from dflash2.errors import Dflash2Error

_NO_FILE = "it is a pipe, socket or device; give a file"


def open_file(path: Path) -> BufferedReader:
    """Open `path` for reading; raises OSError, for a pipe, socket or device too (reading one may never end)."""
    try:
        mode = path.stat().st_mode
    except ValueError as error:
        raise OSError(errno.EINVAL, "its name holds a zero byte", str(path)) from error
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise OSError(errno.EINVAL, _NO_FILE, str(path))
    return path.open("rb")


def exists(path: Path) -> bool:
    """Whether something is at `path`; False for what no file system takes as a name."""
    try:
        return path.exists()
    except OSError:
        return False


@contextmanager
def system_errors(error_class: type[Dflash2Error]) -> Iterator[None]:
    """Raise what the system refuses of a named file (too long a name, no permission) as one sentence of ours."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise
        name = error.filename.decode(errors="replace") if isinstance(error.filename, bytes) else error.filename
        raise error_class(f"Cannot read {name}: {error.strerror or error}.") from error
