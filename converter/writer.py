"""The bytes of a GGUF file, and whether it may be written where it is wanted."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from dflash2.constants import DRAFTER_ARCHITECTURE
from dflash2.converter.encoding import Chunk, EncodedTensor, chunks, encode
from dflash2.converter.entry import Entry
from dflash2.converter.header import TensorRow, aligned, header
from dflash2.errors import OutputError
from dflash2.gguf_info import is_gguf
from dflash2.regular_file import exists
from dflash2.whole_file import behind_links

Progress = Callable[[int, int], None]

_MAX_WORKERS = 4
_SUFFIX = ".gguf"


def check_output(output: Path, inputs: Iterable[Path], folders: Iterable[Path] = ()) -> None:
    """Raise OutputError unless a GGUF file may be written to `output`, before anything is.

    Refused are a folder or device, what has no folder to go to, any of `inputs`, and what is in one of the checkpoint
    `folders` and no GGUF file: whether it was read or not, it belongs to a checkpoint. Links are followed.
    """
    try:
        place = behind_links(output)
        if place.is_dir():
            raise OutputError(f"{output} is a folder; give the path of the GGUF file to write.")
        if place.is_symlink():
            raise OutputError(f"Cannot write {output}: it is a link that leads to itself; remove it.")
        if not place.parent.is_dir():
            raise OutputError(f"Cannot write {output}: the folder {place.parent} does not exist; create it.")
        if place.exists():
            _check_replaced(output, place, inputs, folders)
    except ValueError as error:
        raise OutputError(f"Cannot write {str(output)!r}: its name holds a zero byte; give another path.") from error
    except OSError as error:
        raise OutputError(f"Cannot write {output}: {error.strerror or error}.") from error


def _check_replaced(output: Path, place: Path, inputs: Iterable[Path], folders: Iterable[Path]) -> None:
    if not place.is_file():
        raise OutputError(f"Cannot write {output}: it is a device or pipe, not a file; give the path of a GGUF file.")
    if any(exists(path) and place.samefile(path) for path in inputs):
        raise OutputError(f"Cannot write {output}: it is an input of this conversion; give another path.")
    if place.suffix == _SUFFIX or is_gguf(place):
        return
    for folder in folders:
        if any(parent.samefile(folder) for parent in place.parents):
            raise OutputError(f"Cannot write {output}: it is a file of the checkpoint in {folder}; give another path.")


def write_gguf(
    path: Path,
    metadata: Sequence[Entry],
    tensors: Sequence[EncodedTensor],
    *,
    hashed: Mapping[str, Callable[[], str]] | None = None,
    progress: Progress | None = None,
) -> None:
    """Write a drafter file; the header goes last, so that a file cut short is no GGUF file.

    Args:
        path: file to write.
        metadata: all keys but `general.architecture`.
        tensors: in file order.
        hashed: keys of `metadata` whose text, a SHA-256, takes long to compute: that is done while the tensors are
            written. The value in `metadata` has the same width.
        progress: called with (bytes of tensor data written, bytes of tensor data in all).

    Raises OSError if it cannot be written, CheckpointError if an input cannot be read or holds bad values.
    """
    offsets, total = _layout(tensors)
    table: list[TensorRow] = [
        (tensor.planned.name, tensor.planned.shape, tensor.type, offset)
        for tensor, offset in zip(tensors, offsets, strict=True)
    ]
    data_start = len(header(DRAFTER_ARCHITECTURE, metadata, table))
    with path.open("wb", buffering=0) as file, _workers() as workers:
        file.truncate(data_start + total)
        hashes = {key: workers.submit(compute) for key, compute in (hashed or {}).items()}
        writes = [
            workers.submit(_write, file.fileno(), chunk, data_start + offset)
            for tensor, offset in zip(tensors, offsets, strict=True)
            for chunk in chunks(tensor)
        ]
        done, wanted = 0, sum(tensor.n_bytes for tensor in tensors)
        for write in as_completed(writes):
            done += write.result()
            if progress:
                progress(done, wanted)
        known = {key: done.result() for key, done in hashes.items()}
        entries = [replace(entry, value=known[entry.key]) if entry.key in known else entry for entry in metadata]
        file.write(header(DRAFTER_ARCHITECTURE, entries, table))


def _layout(tensors: Sequence[EncodedTensor]) -> tuple[list[int], int]:
    """Where each tensor begins in the data, and how long the data is."""
    offsets, position = [], 0
    for tensor in tensors:
        offsets.append(position)
        position += aligned(tensor.n_bytes)
    return offsets, position


@contextmanager
def _workers() -> Iterator[ThreadPoolExecutor]:
    """Threads for work that runs outside the interpreter lock; an error drops what has not begun."""
    pool = ThreadPoolExecutor(max_workers=min(_MAX_WORKERS, os.cpu_count() or 1))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _write(descriptor: int, chunk: Chunk, tensor_start: int) -> int:
    """Write one chunk at its place; returns its bytes."""
    data, place = encode(chunk).data, tensor_start + chunk.offset
    done = 0
    while done < len(data):
        done += _write_at(descriptor, data[done:], place + done)
    return done


_moving = threading.Lock()


def _write_at(descriptor: int, data: memoryview, place: int) -> int:
    """Write some of `data` at `place`; returns how many bytes."""
    if hasattr(os, "pwrite"):
        return os.pwrite(descriptor, data, place)
    with _moving:  # Windows: one write at a time
        os.lseek(descriptor, place, os.SEEK_SET)
        return os.write(descriptor, data)
