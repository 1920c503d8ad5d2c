"""Files as blobs of an Ollama server: hashed once, sent if the server lacks them, sent again if the line breaks."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dflash2.cache import cache_folder, cache_path
from dflash2.errors import Dflash2Error, OllamaBrokenError, OllamaDigestError, OllamaError
from dflash2.hashing import sha256_file
from dflash2.modelfiles.ollama.server import Server
from dflash2.regular_file import open_file, system_errors

# Called with what is being done, the bytes done and the bytes in all (None: not known).
Progress = Callable[[str, int, "int | None"], None]

# The protocol knows no parts of blobs: a broken one is sent again from its beginning.
_TRIES = 4
_PAUSE_SECONDS = 0.5
_CHUNK_BYTES = 1 << 20
_CACHE, _DIGESTS = "ollama", "digests.json"
_KEPT_DIGESTS = 1000


@dataclass(frozen=True)
class Blob:
    """One file as a server knows it: `digest` is `sha256:` and 64 hexadecimal digits, `state` what changes with it."""

    path: Path
    digest: str
    n_bytes: int
    state: tuple[int, ...]


@system_errors(OllamaError)
def read_blob(path: Path, progress: Progress) -> Blob:
    """The blob that the file `path` makes; raises OllamaError if it cannot be read or is empty.

    The digest is kept in the cache for as long as the file does not change.
    """
    with open_file(path) as file:
        state = _state(file.fileno())
    n_bytes = state[0]
    if n_bytes == 0:
        raise OllamaError(f"{path} is empty; copy or convert it again.")
    kept = _kept_digests()
    name = str(path.resolve())
    known = kept.get(name)
    if isinstance(known, list) and known[1:] == list(state):
        return Blob(path, f"sha256:{known[0]}", n_bytes, state)
    digest = sha256_file(path, lambda done: progress(f"hashing {path.name}", done, n_bytes))
    blob = Blob(path, f"sha256:{digest}", n_bytes, state)
    _require_unchanged(blob)
    _keep_digest(kept, name, [digest, *state])
    return blob


def send(server: Server, blob: Blob, progress: Progress) -> bool:
    """Let `server` have `blob`; returns whether it had to be sent.

    Raises OllamaError if the server refuses it, the file changes meanwhile, or the connection breaks too often.
    """
    for tried in range(1, _TRIES + 1):
        try:
            # Asked again before every try: perhaps only the answer was lost.
            if server.has_blob(blob.digest):
                return tried > 1
            server.send_blob(blob.digest, blob.n_bytes, _chunks(blob, progress))
            return True
        except OllamaBrokenError as error:
            if tried == _TRIES:
                raise OllamaError(
                    f"The connection to {server.url} broke {_TRIES} times while {blob.path} was sent; look into the"
                    " server's log, then run it again: what has arrived is not sent again."
                ) from error
            time.sleep(_PAUSE_SECONDS * tried)
        except OllamaDigestError as error:
            _require_unchanged(blob)
            raise OllamaError(
                f"{server.url} got other bytes than {blob.path} holds; check the network and the disk, then run it"
                " again."
            ) from error
    raise AssertionError("the last try returns or raises")


def _chunks(blob: Blob, progress: Progress) -> Iterator[bytes]:
    """The bytes that were hashed; raises OllamaError if there are fewer now."""
    done = 0
    with system_errors(OllamaError), open_file(blob.path) as file:
        while done < blob.n_bytes:
            chunk = file.read(min(_CHUNK_BYTES, blob.n_bytes - done))
            if not chunk:
                raise _changed(blob)
            yield chunk
            done += len(chunk)
            progress(f"sending {blob.path.name}", done, blob.n_bytes)


def _require_unchanged(blob: Blob) -> None:
    with open_file(blob.path) as file:
        if _state(file.fileno()) != blob.state:
            raise _changed(blob)


def _changed(blob: Blob) -> OllamaError:
    return OllamaError(f"{blob.path} changed while it was sent; wait until it is complete, then run it again.")


def _state(descriptor: int) -> tuple[int, ...]:
    """What differs once a file was written to; its time of change cannot be set back."""
    status = os.fstat(descriptor)
    return (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


def _kept_digests() -> dict[str, object]:
    try:
        kept = json.loads((cache_path(_CACHE) / _DIGESTS).read_bytes())
    except (OSError, ValueError):
        return {}
    return kept if isinstance(kept, dict) else {}


def _keep_digest(kept: dict[str, object], name: str, entry: object) -> None:
    """Best effort: without it, the file is hashed again."""
    recent = dict([*kept.items(), (name, entry)][-_KEPT_DIGESTS:])
    with contextlib.suppress(OSError, Dflash2Error):
        folder = cache_folder(_CACHE)
        with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".tmp", delete=False) as file:
            json.dump(recent, file)
        Path(file.name).replace(folder / _DIGESTS)
