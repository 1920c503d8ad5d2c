"""Where a drafter file comes from: repository and commit, licence, and the SHA-256 of every input."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from dflash2.converter.entry import STRING, U32, Entry
from dflash2.errors import CheckpointError
from dflash2.hashing import sha256_file
from dflash2.hub import Snapshot
from dflash2.model_card import CARD, license_of, read_card

# Files up to this size are hashed at once, others while the tensors are written.
_SMALL_BYTES = 1 << 20
# Stands for a SHA-256 that is not known yet; of the same width.
UNKNOWN_HASH = "0" * 64
_INPUT = "dflash2.input"
_NO_DERIVATIVES = re.compile(r"(?:^|-)nd(?:-|$)", re.IGNORECASE)


@dataclass(frozen=True)
class InputFile:
    """A file that was read in full: its `name` in the record, as `drafter/model.safetensors`, and where it is.

    `stated` is the SHA-256 that the Hub gives for it, None if it gives none.
    """

    name: str
    path: Path
    stated: str | None = None

    def sha256(self) -> str:
        """The file's SHA-256; raises CheckpointError if it cannot be read or is another than stated."""
        try:
            found = sha256_file(self.path)
        except OSError as error:
            raise CheckpointError(f"Cannot read {self.path}: {error.strerror or error}.") from error
        if self.stated and found != self.stated:
            raise CheckpointError(
                f"{self.path} is damaged: its SHA-256 is {found}, the Hub states {self.stated}; remove"
                f" {self.path.resolve()} and run it again."
            )
        return found


def input_files(drafter: Snapshot, used: Iterable[Path], target: Snapshot) -> tuple[InputFile, ...]:
    """The inputs of a conversion: what was `used` of the drafter's folder with its card, and the target's files.

    A target's GGUF is left out: only its header is read, which the output repeats.
    """
    folder = drafter.path
    paths = {*used, folder / CARD}
    stated = {file.path: file.sha256 for file in (*drafter.files, *target.files)}
    files = [
        InputFile(f"drafter/{_relative(path, folder)}", path, stated.get(path))
        for path in sorted(paths)
        if path.is_file()
    ]
    if target.path.is_dir():
        files += [InputFile(f"target/{path.name}", path, stated.get(path)) for path in _small_files(target.path)]
    return tuple(files)


def _relative(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix() if path.is_relative_to(folder) else path.name


def _small_files(folder: Path) -> list[Path]:
    """Config and tokenizer files: all that is read of a target's folder."""
    names = ("config.json", "token*", "*tokens*.json", "merges.txt", "vocab.json", "chat_template*")
    found = {path for name in names for path in folder.glob(name) if path.is_file()}
    return sorted(path for path in found if path.suffix != ".safetensors")


def input_entries(inputs: Iterable[InputFile]) -> tuple[tuple[Entry, ...], Mapping[str, Callable[[], str]]]:
    """Keys `dflash2.input.N.name` and `.sha256`; the mapping computes those of large files, which come later."""
    entries: list[Entry] = []
    pending: dict[str, Callable[[], str]] = {}
    listed = list(inputs)
    for number, file in enumerate(listed):
        key = f"{_INPUT}.{number}.sha256"
        value = UNKNOWN_HASH
        if file.path.stat().st_size > _SMALL_BYTES:
            pending[key] = file.sha256
        else:
            value = file.sha256()
        entries += [Entry(f"{_INPUT}.{number}.name", file.name, STRING), Entry(key, value, STRING)]
    return (Entry(f"{_INPUT}.count", len(listed), U32), *entries), pending


def source_entries(drafter: Snapshot, target: Snapshot) -> Iterator[Entry]:
    """Repository and commit of what came from the Hub."""
    if drafter.repo_id and drafter.revision:
        yield Entry("general.source.huggingface.repository", drafter.repo_id, STRING)
        yield Entry("general.source.revision", drafter.revision, STRING)
    if target.repo_id and target.revision:
        yield Entry("dflash2.source.target.repository", target.repo_id, STRING)
        yield Entry("dflash2.source.target.revision", target.revision, STRING)


def license_notes(folder: Path) -> tuple[str, ...]:
    """What a user should know of the licence in the card of the drafter's `folder`; nothing if it names none."""
    found = license_of(read_card(folder))
    if found is None:
        return ()
    if _NO_DERIVATIVES.search(found):
        return (
            f"Licence of the drafter: {found}. It allows no derivatives: convert for your own use, and do not pass the"
            " file on.",
        )
    return (f"Licence of the drafter: {found}.",)
