"""The published pairs by short name, and which of them run on the llama.cpp at hand.

The data is registry.json: sizes, taps and tokens as the checkpoints' configs have them, null where they are not known.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Literal

from dflash2 import hub, native
from dflash2.constants import FINAL_TAP_ARCHITECTURES, TAPPABLE_ARCHITECTURES
from dflash2.errors import GGUFError, NativeError
from dflash2.regular_file import exists

SCHEMA = "dflash2.list/1"
_DATA = "registry.json"

Converts = Literal["yes", "with-option", "no"]


@dataclass(frozen=True)
class RegistryEntry:
    """One published pair.

    `key` is its short name, `method` 1 for DFlash and 2 for DFlash 2. `drafter` and `target` are repository ids,
    `target_architecture` is the target's name in GGUF. `layers` and `hidden_size` are the drafter's, `taps` count
    from 0 as in config.json, out of `target_layers`. `converts` says whether this package converts the drafter, and
    `conversion` with which option, or why not. `license` is the one the model card states.
    """

    key: str
    method: int
    drafter: str
    target: str
    target_architecture: str
    layers: int
    hidden_size: int
    block_size: int | None
    taps: tuple[int, ...]
    target_layers: int | None
    mask_token_id: int | None
    converts: Converts
    conversion: str | None
    license: str | None
    note: str | None

    @property
    def stock_obstacle(self) -> str | None:
        """Why stock llama.cpp cannot run the pair; None if it can."""
        return self.obstacle(TAPPABLE_ARCHITECTURES, FINAL_TAP_ARCHITECTURES)

    def obstacle(self, tappable: frozenset[str], final_tap: frozenset[str]) -> str | None:
        """Why a llama.cpp that taps these architectures, and the last layer's output of those, cannot run the pair."""
        architecture = self.target_architecture
        if architecture not in tappable:
            return f"llama.cpp publishes no layer inputs for {architecture} targets"
        final = self.target_layers is not None and max(self.taps) == self.target_layers - 1
        if final and architecture not in final_tap:
            return f"it taps the last layer, which llama.cpp does not publish for {architecture} targets"
        return f"it is not converted: {self.conversion}" if self.converts == "no" else None


@dataclass(frozen=True)
class Availability:
    """Whether a pair runs on the library at hand (`here`, None if there is no library), and why not."""

    entry: RegistryEntry
    here: bool | None
    reason: str | None

    def to_dict(self) -> dict[str, object]:
        """JSON values; the schema is in docs/inspect.md."""
        return {
            **asdict(self.entry),
            "taps": list(self.entry.taps),
            "runs_on_stock": self.entry.stock_obstacle is None,
            "runs_here": self.here,
            "reason": self.reason,
        }


@cache
def registry() -> tuple[RegistryEntry, ...]:
    """All published pairs, DFlash 2 first."""
    rows = json.loads((files("dflash2.converter.checking") / _DATA).read_text(encoding="utf-8"))
    return tuple(RegistryEntry(**{**row, "taps": tuple(row["taps"])}) for row in rows)


def resolve(name: str) -> RegistryEntry | None:
    """The pair that `name` stands for: its key, or the drafter's repository with or without the owner; any case.

    None for anything else, and for a file or folder of that name, which goes first.
    """
    if not name or exists(Path(name)):
        return None
    wanted = name.casefold()
    return next((entry for entry in registry() if wanted in _names(entry)), None)


def require_local(path: Path, *, target: bool = False) -> None:
    """Raise GGUFError if `path` is not there and spelled like a Hub id or the name of a pair: those are not fetched.

    `target` says which of a pair's two models is wanted.
    """
    name = path.as_posix()
    known = resolve(name)
    if exists(path) or path.suffix == ".gguf" or not (known or hub.is_repo_id(name)):
        return
    give = f"run `dflash2-convert {name}{'' if known else ' --target TARGET'}` and give the GGUF file that it writes"
    if target:
        give = "give the target's GGUF file, or the folder with its config.json and tokenizer"
    raise GGUFError(f"{name} is no file or folder here, and only local ones are read; {give}.")


def close_names(name: str) -> tuple[str, ...]:
    """Keys that resemble `name`, the most similar first; at most three."""
    wanted = name.casefold().rsplit("/", 1)[-1]
    by_name = {alias: entry.key for entry in registry() for alias in _names(entry)}
    found = get_close_matches(wanted, by_name, n=9, cutoff=0.7)
    return tuple(dict.fromkeys(by_name[alias] for alias in found))[:3]


def availability() -> tuple[Availability, ...]:
    """Every pair, and whether it runs on the library at hand."""
    try:
        support = native.support()
    except NativeError as error:
        return tuple(
            Availability(entry, False if entry.stock_obstacle else None, entry.stock_obstacle or str(error))
            for entry in registry()
        )
    found = []
    for entry in registry():
        obstacle = entry.obstacle(native.tappable_architectures(), native.final_tap_architectures())
        obstacle = obstacle or _obstacle_here(entry, support)
        found.append(Availability(entry, obstacle is None, obstacle))
    return tuple(found)


def list_dict(found: tuple[Availability, ...]) -> dict[str, object]:
    """JSON values of a list; the schema is in docs/inspect.md."""
    return {"schema": SCHEMA, "pairs": [one.to_dict() for one in found]}


def _obstacle_here(entry: RegistryEntry, support: native.Support) -> str | None:
    if support.missing:
        return f"{support.library.path} lacks {', '.join(support.missing)}"
    if support.drafters < entry.method:
        return f"llama-cpp-python {support.version} loads no DFlash{' 2' if entry.method == 2 else ''} drafters"
    if not native.knows_architecture(entry.target_architecture):
        return f"llama-cpp-python {support.version} does not know {entry.target_architecture} models"
    return None


def _names(entry: RegistryEntry) -> tuple[str, ...]:
    return tuple(name.casefold() for name in (entry.key, entry.drafter, entry.drafter.rsplit("/", 1)[-1]))
