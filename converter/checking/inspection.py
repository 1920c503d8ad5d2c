"""What a GGUF file or a checkpoint folder is: a drafter with its cycle facts, or another model with its basic ones."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from gguf.constants import LlamaFileType

from dflash2.converter.checking.checkpoint_facts import CheckpointFacts, read_checkpoint_facts
from dflash2.converter.checking.drafter_checks import drafter_findings
from dflash2.converter.checking.drafter_facts import DrafterFacts, drafter_facts
from dflash2.converter.checking.findings import Finding, problems
from dflash2.converter.checking.forks import is_drafter, read_spelling
from dflash2.converter.checking.inspection_json import inspection_dict
from dflash2.converter.checking.inspection_rows import Row, rows_of
from dflash2.converter.checking.registry import require_local
from dflash2.errors import CheckpointError, GGUFError
from dflash2.gguf_info import GGUFInfo, TensorInfo, read_gguf_info
from dflash2.regular_file import system_errors

Kind = Literal["drafter", "fork drafter", "model", "checkpoint"]

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")


@dataclass(frozen=True)
class TypeUse:
    """How much of a file one tensor type takes."""

    type_name: str
    n_tensors: int
    n_bytes: int


@dataclass(frozen=True)
class Shard:
    """Place of one file in a split GGUF, counted from 1; `n_tensors` of all files together."""

    number: int
    count: int
    n_tensors: int | None


@dataclass(frozen=True)
class Inspection:
    """One GGUF file or checkpoint folder: sizes are counts, `n_bytes` those of the file or of the tensors' data.

    `kind` says what it is, `drafter` is set for GGUF drafters (a fork's ones read as upstream would spell them),
    `checkpoint` for folders. `problems` are the failed checks of a drafter GGUF by itself.
    """

    path: Path
    n_bytes: int
    architecture: str
    name: str | None
    file_type: str | None
    layers: int | None
    hidden_size: int | None
    context_length: int | None
    vocab_size: int | None
    n_parameters: int
    types: tuple[TypeUse, ...]
    tensors: tuple[TensorInfo, ...] = field(repr=False)
    drafter: DrafterFacts | None = None
    kind: Kind = "model"
    license: str | None = None
    shard: Shard | None = None
    checkpoint: CheckpointFacts | None = None
    problems: tuple[Finding, ...] = ()

    def rows(self) -> tuple[Row, ...]:
        """(label, value) pairs, ready for a table."""
        return rows_of(self)

    def to_dict(self, *, tensors: bool = False) -> dict[str, object]:
        """JSON values; the schema is in docs/inspect.md. `tensors` adds the list of all of them."""
        return inspection_dict(self, tensors=tensors)


@system_errors(GGUFError)
def inspect(path: Path | str) -> Inspection:
    """Say what the GGUF file or the checkpoint folder at `path` is; no weights are read.

    Raises:
        GGUFError: a file that cannot be read or is no GGUF.
        CheckpointError: a folder without a readable config.json.
    """
    if not str(path):
        raise GGUFError("the path is empty; give a GGUF file or the folder of a checkpoint.")
    path = Path(path)
    require_local(path)
    if path.is_dir():
        return _inspect_folder(path)
    if path.is_file() and (path.suffix in _WEIGHTS or path.name == "config.json"):
        raise GGUFError(f"{path} is one file of a checkpoint; give its folder, {path.parent}.")
    return _inspect_gguf(read_gguf_info(path))


def _inspect_gguf(info: GGUFInfo) -> Inspection:
    kind: Kind = "model"
    facts: DrafterFacts | None = None
    failed: tuple[Finding, ...] = ()
    read = info
    if is_drafter(info):
        spelling = read_spelling(info)
        read = spelling.info
        kind = "fork drafter" if spelling.fork else "drafter"
        facts = drafter_facts(read)
        # One file of several holds neither all tensors nor, after the first, the metadata.
        failed = () if _shard(info) else problems(drafter_findings(spelling, facts))
    tokens = read.metadata.get("tokenizer.ggml.tokens")
    return Inspection(
        path=info.path,
        n_bytes=info.path.stat().st_size,
        architecture=info.architecture,
        name=_text(info, "general.name"),
        file_type=_file_type(info),
        layers=read.integer(read.own("block_count")),
        hidden_size=read.integer(read.own("embedding_length")),
        context_length=read.integer(read.own("context_length")),
        vocab_size=len(tokens) if isinstance(tokens, tuple) else None,
        n_parameters=sum(math.prod(tensor.shape) for tensor in info.tensors),
        types=_type_uses((tensor.type_name, tensor.n_bytes) for tensor in info.tensors),
        tensors=info.tensors,
        drafter=facts,
        kind=kind,
        license=_text(info, "general.license.name") or _text(info, "general.license"),
        shard=_shard(info),
        problems=failed,
    )


def _inspect_folder(folder: Path) -> Inspection:
    if not (folder / "config.json").is_file():
        held = sorted(folder.glob("*.gguf"))
        hint = f"give one of its GGUF files, e.g. {held[0]}" if held else "give a GGUF file or a checkpoint folder"
        raise CheckpointError(f"{folder} has no config.json; {hint}.")
    facts = read_checkpoint_facts(folder)
    config = facts.config
    tensors = tuple(
        TensorInfo(tensor.name, tuple(reversed(tensor.shape)), tensor.dtype, tensor.offset, tensor.n_bytes)
        for tensor in facts.tensors
    )
    return Inspection(
        path=folder,
        n_bytes=sum(tensor.n_bytes for tensor in tensors),
        architecture=facts.dialect or "",
        name=folder.resolve().name,
        file_type=None,
        layers=config.layers if config else None,
        hidden_size=config.hidden_size if config else None,
        context_length=config.context_length if config else None,
        vocab_size=config.vocab_size if config else None,
        n_parameters=sum(math.prod(tensor.shape) for tensor in tensors),
        types=_type_uses((tensor.type_name, tensor.n_bytes) for tensor in tensors),
        tensors=tensors,
        kind="checkpoint",
        license=facts.license,
        checkpoint=facts,
    )


def _type_uses(tensors: Iterable[tuple[str, int]]) -> tuple[TypeUse, ...]:
    """Types in order of the bytes they take, most first."""
    sizes: dict[str, list[int]] = {}
    for name, n_bytes in tensors:
        sizes.setdefault(name, []).append(n_bytes)
    uses = (TypeUse(name, len(held), sum(held)) for name, held in sizes.items())
    return tuple(sorted(uses, key=lambda use: (-use.n_bytes, use.type_name)))


def _shard(info: GGUFInfo) -> Shard | None:
    count = info.integer("split.count")
    if count is None or count < 2:
        return None
    return Shard((info.integer("split.no") or 0) + 1, count, info.integer("split.tensors.count"))


def _file_type(info: GGUFInfo) -> str | None:
    number = info.integer("general.file_type")
    try:
        return None if number is None else LlamaFileType(number).name.split("_", 1)[1]
    except ValueError:
        return f"number {number}"


def _text(info: GGUFInfo, key: str) -> str | None:
    value = info.metadata.get(key)
    return value if isinstance(value, str) else None
