"""What a user says where a checkpoint is silent, or wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from dflash2.constants import MAX_BLOCK_SIZE, MIN_BLOCK_SIZE
from dflash2.converter.entry import fits_f32
from dflash2.errors import OptionError

TapIds = Literal["outputs", "inputs"]
VocabularyMap = Literal["offsets", "absolute"]
_MAX_TOKEN = 2**31 - 1


@dataclass(frozen=True)
class Overrides:
    """Values that go before those of config.json; None leaves the checkpoint's own.

    `block_size` (tokens) and `mask_token_id` are the drafter's; `sliding_window` keeps or drops the window of
    sliding layers, which some configs leave open; `tap_ids` says whether the checkpoint's tap ids name layers by
    their output (z-lab: id i is the output of layer i) or by their input (id i is the input of layer i);
    `rope_theta` is the base of the rotary embedding; `d2t` says whether the map of a reduced vocabulary holds token
    ids as they are or minus their row. Raises OptionError for a value that none of them can have.
    """

    block_size: int | None = None
    mask_token_id: int | None = None
    sliding_window: bool | None = None
    tap_ids: TapIds | None = None
    rope_theta: float | None = None
    d2t: VocabularyMap | None = None

    def __post_init__(self) -> None:
        """Refuse what a caller without a type checker may have given."""
        for name, expected, fits in (
            (
                "block_size",
                f"an integer from {MIN_BLOCK_SIZE} to {MAX_BLOCK_SIZE}",
                _is_integer(self.block_size, MIN_BLOCK_SIZE, MAX_BLOCK_SIZE),
            ),
            ("mask_token_id", f"an integer from 0 to {_MAX_TOKEN}", _is_integer(self.mask_token_id, 0, _MAX_TOKEN)),
            ("sliding_window", "True or False", isinstance(self.sliding_window, bool)),
            ("tap_ids", " or ".join(map(repr, get_args(TapIds))), self.tap_ids in get_args(TapIds)),
            ("rope_theta", "a positive number that 32 bits hold", _is_positive(self.rope_theta)),
            ("d2t", " or ".join(map(repr, get_args(VocabularyMap))), self.d2t in get_args(VocabularyMap)),
        ):
            if getattr(self, name) is not None and not fits:
                raise OptionError(f"The option {name!r} is {getattr(self, name)!r}; give {expected}.")


def _is_integer(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0 and fits_f32(value)


NO_OVERRIDES = Overrides()
