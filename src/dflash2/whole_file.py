"""Output files that are either complete or not there: written beside their place, synced, then renamed."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dflash2.errors import OutputError

_NAME_PART = 32  # characters


def behind_links(output: Path) -> Path:
    """The file that `output` stands for; a link in a circle stands for itself."""
    return Path(os.path.realpath(output))


@contextmanager
def replacing(output: Path) -> Iterator[Path]:
    """A path beside `output` to write to; it takes the place of `output` when the block ends without an error.

    Whatever happens, `output` (of a link, what it leads to) is the whole new file or what it was before. Raises
    OutputError for the system's errors.
    """
    place = behind_links(output)
    # Far from the 255 bytes of a name, whatever follows.
    temporary = place.with_name(f".{place.name[:_NAME_PART]}.{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(place)
    except OSError as error:
        raise OutputError(f"Cannot write {output}: {error.strerror or error}.") from error
    finally:
        temporary.unlink(missing_ok=True)
