"""Prompts from files and from data sets of the Hub: JSON, JSON lines, text; Parquet where pyarrow is installed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from dflash2.errors import EvidenceError
from dflash2.evidence.prompts import Prompt
from dflash2.hub import fetch_dataset_file

_FIELDS = ("prompt", "question", "problem", "text", "instruction", "turns", "input", "content")
_READABLE = (".jsonl", ".json")
_PARQUET = ".parquet"
_SPLITS = ("test", "validation", "train")


def file_prompts(path: Path, category: str = "own", *, most: int | None = None) -> tuple[Prompt, ...]:
    """The first `most` prompts of a file: `.txt` has one a line, JSON an object or a string each.

    Of an object, the first of these fields counts: prompt, question, problem, text, instruction, turns, input, content.
    A list in it is the user's messages of a conversation. Raises EvidenceError.
    """
    try:
        found = [
            Prompt(f"{category}-{number}", category, turns[0], turns[1:])
            for number, turns in enumerate((_turns(entry, path) for entry in _entries(path)), 1)
        ][:most]
    except OSError as error:
        raise EvidenceError(f"Cannot read {path}: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise EvidenceError(f"{path} cannot be read as {path.suffix or 'text'}: {error}.") from error
    if not found:
        raise EvidenceError(f"{path} holds no prompt.")
    return tuple(found)


def dataset_prompts(spec: str, *, most: int | None = None) -> tuple[Prompt, ...]:
    """The first `most` prompts of a data set of the Hub, `owner/name` or `owner/name:split`.

    In the place of a split a file of the data set can be named. By default the split is test, validation or train, the
    first that there is. Raises HubError, EvidenceError.
    """
    repo_id, _, split = spec.partition(":")
    file = fetch_dataset_file(repo_id, lambda names: _choose(repo_id, names, split))
    return file_prompts(file.path, f"{repo_id}:{file.name}", most=most)


def _choose(repo_id: str, names: Sequence[str], split: str) -> str:
    if split in names:
        return split
    for suffixes in (_READABLE, (_PARQUET,)):
        data = [name for name in names if name.endswith(suffixes) and PurePosixPath(name).name != "dataset_infos.json"]
        for wanted in (split,) if split else _SPLITS:
            found = [name for name in data if wanted in PurePosixPath(name).name]
            if len(found) == 1:
                return found[0]
            if found:
                raise EvidenceError(f"{repo_id} has several files for {wanted}; name one: {', '.join(found)}.")
        if len(data) == 1 and not split:
            return data[0]
    listed = ", ".join(name for name in names if name.endswith((*_READABLE, _PARQUET))) or "no such file"
    raise EvidenceError(f"{repo_id} has no JSON or Parquet file for {split or 'a split'}; it has {listed}.")


def _entries(path: Path) -> Iterator[Any]:
    if path.suffix == _PARQUET:
        yield from _parquet(path)
        return
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        data = json.loads(text)
        yield from data if isinstance(data, list) else [data]
        return
    for line in filter(str.strip, text.splitlines()):
        yield json.loads(line) if path.suffix == ".jsonl" else line


def _parquet(path: Path) -> Sequence[Any]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise EvidenceError(f"{path.name} is Parquet, which needs pyarrow; pip install pyarrow.") from error
    rows: Sequence[Any] = parquet.read_table(path).to_pylist()
    return rows


def _turns(entry: Any, path: Path) -> tuple[str, ...]:
    if isinstance(entry, Mapping):
        named = next((field for field in _FIELDS if entry.get(field)), None)
        if named is None:
            raise EvidenceError(
                f"{path}: an entry has none of the fields {', '.join(_FIELDS)}, but {', '.join(entry)}."
            )
        entry = entry[named]
    turns = tuple(entry) if isinstance(entry, list) else (entry,)
    if not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise EvidenceError(f"{path}: a prompt is {entry!r}, not a text or a list of texts.")
    return turns
