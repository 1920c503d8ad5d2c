"""SHA-256 of files, as checkpoints and the Hub state it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from dflash2.regular_file import open_file

_CHUNK_BYTES = 4 << 20


def sha256_file(path: Path, progress: Callable[[int], object] | None = None) -> str:
    """SHA-256 of the file's bytes, 64 hexadecimal characters; raises OSError if it cannot be read.

    `progress` is called with the number of bytes read so far.
    """
    digest = hashlib.sha256()
    with open_file(path) as file:
        buffer = bytearray(_CHUNK_BYTES)
        view = memoryview(buffer)
        while count := file.readinto(buffer):
            digest.update(view[:count])
            if progress is not None:
                progress(file.tell())
    return digest.hexdigest()
