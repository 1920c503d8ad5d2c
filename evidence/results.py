"""Results as files: one schema for everything that is measured or verified."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from dflash2 import __version__
from dflash2.errors import EvidenceError
from dflash2.evidence.machine import Machine, this_machine
from dflash2.gguf_info import read_gguf_info
from dflash2.hashing import sha256_file
from dflash2.native import Device
from dflash2.whole_file import replacing

SCHEMA = 1
_PACKAGES = ("llama-cpp-python", "numpy", "gguf")


def _versions() -> Mapping[str, str]:
    found = {"llama-dflash2": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


@dataclass(frozen=True)
class ModelFile:
    """A model that was used: its `role` (target, drafter ...), file name, size, SHA-256 and GGUF architecture.

    `weights`: how many tensors have each type, by GGUF's names.
    """

    role: str
    name: str
    n_bytes: int
    sha256: str
    architecture: str
    weights: Mapping[str, int]


@dataclass(frozen=True)
class Result:
    """What one command found.

    Attributes:
        command: its name, such as "verify".
        engine: what generated, as `Engine.about` words it.
        models: the files, empty for a server whose files are not known here.
        conditions: options that decide the numbers, by name.
        rows: the table, one flat mapping a row, all with the same keys where they are of one kind.
        summary: totals and verdicts.
        machine, versions, made: where, with what, and when (UTC, ISO 8601).
        schema: version of this layout.
    """

    command: str
    engine: Mapping[str, Any]
    models: tuple[ModelFile, ...]
    conditions: Mapping[str, Any]
    rows: tuple[Mapping[str, Any], ...]
    summary: Mapping[str, Any]
    machine: Machine = field(default_factory=this_machine)
    versions: Mapping[str, str] = field(default_factory=_versions)
    made: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds"))
    schema: int = SCHEMA


def model_files(**paths: Path) -> tuple[ModelFile, ...]:
    """What is known of each GGUF file, by role; hashes them. Raises GGUFError, OSError."""
    return tuple(_model_file(role, path) for role, path in paths.items())


def _model_file(role: str, path: Path) -> ModelFile:
    info = read_gguf_info(path)
    weights: dict[str, int] = {}
    for tensor in info.tensors:
        weights[tensor.type_name] = weights.get(tensor.type_name, 0) + 1
    return ModelFile(role, path.name, path.stat().st_size, sha256_file(path), info.architecture, weights)


def write_result(result: Result, path: Path) -> None:
    """Write `result` as JSON, numbers that are not finite as null, as a whole or not at all; raises OutputError."""
    text = json.dumps(_finite(asdict(result)), indent=1, allow_nan=False) + "\n"
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _finite(value: Any) -> Any:
    """`value` with null in the place of every number that JSON has no word for."""
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_result(path: Path, command: str | None = None) -> Result:
    """The result in the file at `path`, of `command` if given; raises EvidenceError if it is none."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["schema"] != SCHEMA:
            raise EvidenceError(f"{path} has schema {data['schema']!r}, this version reads {SCHEMA}; measure again.")
        machine = data["machine"]
        result = Result(
            **{
                **data,
                "machine": Machine(**{**machine, "devices": tuple(Device(**one) for one in machine["devices"])}),
                "models": tuple(ModelFile(**one) for one in data["models"]),
                "rows": tuple(data["rows"]),
            }
        )
    except OSError as error:
        raise EvidenceError(f"Cannot read {path}: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise EvidenceError(f"{path} is no result of dflash2; give a file that --json wrote.") from error
    if command is not None and result.command != command:
        raise EvidenceError(f"{path} is a result of dflash2 {result.command}, not of {command}.")
    return result


def same_models(a: Sequence[ModelFile], b: Sequence[ModelFile]) -> bool:
    """Whether two results are of the same files."""
    return {(one.role, one.sha256) for one in a} == {(one.role, one.sha256) for one in b}
