"""Which files of a repository of GGUF files are meant: llama.cpp's `-hf owner/name[:QUANT]`, for targets and drafters.

Rules: `find_best_model` and `gguf_filename_is_model` of llama.cpp's common/download.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePosixPath

from dflash2.errors import HubError

# Taken in this order where no quantisation is named; then the first file of all.
_DEFAULTS = ("Q4_K_M", "Q8_0")
_DRAFTER_MARK = "dflash-"
# Files beside a model that are none: projectors, importance matrices, other kinds of drafters.
_NO_MODELS = ("mmproj", "imatrix", "mtp-", "eagle3-", "dspark-")
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
_LISTED = 12


def split_quant(spec: str) -> tuple[str, str | None]:
    """`owner/name:QUANT` as (`owner/name`, `QUANT`); None where no quantisation is named."""
    name, colon, quant = spec.partition(":")
    return name, quant if colon else None


def choose_target(repo_id: str, names: Sequence[str], quant: str | None) -> list[str]:
    """Of the file `names` of a repository, the target's: one GGUF, or all parts of a split one in their order.

    Raises HubError if there is none of that quantisation, or a part is missing.
    """
    return _choose(repo_id, [name for name in _models(names) if not _is_drafter(name)], quant, names)


def choose_drafter(repo_id: str, names: Sequence[str], quant: str | None) -> list[str]:
    """The same for a drafter: files named `dflash-...` if there are any, llama.cpp's name for one beside a target."""
    models = _models(names)
    return _choose(repo_id, [name for name in models if _is_drafter(name)] or models, quant, names)


def _models(names: Sequence[str]) -> list[str]:
    """GGUF files that hold a model; of a split one the first part stands for all."""
    found = []
    for name in names:
        file = PurePosixPath(name).name.lower()
        part = _PART.fullmatch(file)
        first = part is None or int(part["number"]) == 1
        if first and file.endswith(".gguf") and not any(mark in file for mark in _NO_MODELS):
            found.append(name)
    return found


def _is_drafter(name: str) -> bool:
    return _DRAFTER_MARK in PurePosixPath(name).name.lower()


def _choose(repo_id: str, models: Sequence[str], quant: str | None, names: Sequence[str]) -> list[str]:
    for wanted in _DEFAULTS if quant is None else (quant,):
        # Not in the middle of a word: F16 is not BF16, Q4_0 not IQ4_0.
        pattern = re.compile(rf"(?<![A-Za-z0-9]){re.escape(wanted)}[.-]", re.IGNORECASE)
        for name in models:
            if pattern.search(name):
                return _with_parts(repo_id, name, names)
    if quant is None and models:
        return _with_parts(repo_id, models[0], names)
    held = ", ".join(models[:_LISTED]) + (", ..." if len(models) > _LISTED else "")
    if quant is not None and held:
        raise HubError(f"{repo_id} has no GGUF file of quantisation {quant!r}; it has {held}.")
    raise HubError(f"{repo_id} has no GGUF file of a model; give a repository of GGUF files, or a file of your own.")


def _with_parts(repo_id: str, name: str, names: Sequence[str]) -> list[str]:
    part = _PART.fullmatch(name)
    if part is None:
        return [name]
    wanted = [f"{part['stem']}-{number:05d}-of-{part['count']}.gguf" for number in range(1, int(part["count"]) + 1)]
    for one in wanted:
        if one not in names:
            raise HubError(f"{repo_id} lacks {one}, a part of {name}; choose another quantisation.")
    return wanted
