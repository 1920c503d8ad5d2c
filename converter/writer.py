"""A GGUF file that is either complete or not there: written beside its place, synced, then renamed."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
from gguf import GGUFWriter
from gguf.constants import GGUF_DEFAULT_ALIGNMENT

from dflash2.constants import DRAFTER_ARCHITECTURE
from dflash2.converter.encoding import EncodedTensor, encode
from dflash2.converter.metadata import Entry
from dflash2.errors import OutputError

Progress = Callable[[int, int], None]


def check_output(output: Path, inputs: Iterable[Path]) -> None:
    """Raise OutputError if `output` is a folder or device, has no folder to go to, or would replace an input."""
    if output.is_dir():
        raise OutputError(f"{output} is a folder; give the path of the GGUF file to write.")
    if not output.parent.is_dir():
        raise OutputError(f"Cannot write {output}: the folder {output.parent} does not exist; create it.")
    if output.exists():
        if not output.is_file():
            raise OutputError(
                f"Cannot write {output}: it is a device or pipe, not a file; give the path of a GGUF file."
            )
        for path in inputs:
            if path.exists() and output.samefile(path):
                raise OutputError(f"Cannot write {output}: it is an input of this conversion; give another path.")


def write_gguf(
    output: Path, metadata: Sequence[Entry], tensors: Sequence[EncodedTensor], progress: Progress | None = None
) -> None:
    """Write the file; `progress` gets (bytes of tensor data written, bytes of tensor data in all).

    Raises OutputError if it cannot be written. Whatever happens, `output` is the whole new file or what it was
    before, and no temporary file stays behind.
    """
    temporary = output.with_name(f".{output.name}.{secrets.token_hex(4)}.tmp")
    try:
        try:
            _write_header(temporary, metadata, tensors)
            with temporary.open("ab") as file:
                _write_tensors(file, tensors, progress)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(output)
        except OSError as error:
            raise OutputError(f"Cannot write {output}: {error.strerror or error}.") from error
    finally:
        temporary.unlink(missing_ok=True)


def _write_header(path: Path, metadata: Sequence[Entry], tensors: Sequence[EncodedTensor]) -> None:
    writer = GGUFWriter(path, DRAFTER_ARCHITECTURE)
    try:
        for entry in metadata:
            writer.add_key_value(entry.key, _encodable(entry.value), entry.type.kind, entry.type.element)
        for tensor in tensors:
            # A dtype other than uint8 makes the writer take the shape in elements.
            writer.add_tensor_info(
                tensor.planned.name, tensor.planned.shape, np.dtype(np.float32), tensor.n_bytes, raw_dtype=tensor.type
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
    finally:
        writer.close()


def _encodable(value: object) -> object:
    """Text as the bytes it was read from, which need not be UTF-8."""
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape")
    if isinstance(value, tuple):
        return [_encodable(item) for item in value]
    return value


def _write_tensors(file: BinaryIO, tensors: Sequence[EncodedTensor], progress: Progress | None) -> None:
    total = sum(tensor.n_bytes for tensor in tensors)
    done = 0
    _pad(file)
    for tensor in tensors:
        start = done
        for chunk in encode(tensor):
            file.write(chunk.data)
            done += chunk.nbytes
            if progress:
                progress(done, total)
        assert done - start == tensor.n_bytes, f"{tensor.planned.name}: {done - start} bytes, planned {tensor.n_bytes}"
        _pad(file)


def _pad(file: BinaryIO) -> None:
    file.write(bytes(-file.tell() % GGUF_DEFAULT_ALIGNMENT))
