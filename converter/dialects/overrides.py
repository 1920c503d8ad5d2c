"""What a user says where a checkpoint is silent, or wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TapIds = Literal["outputs", "inputs"]


@dataclass(frozen=True)
class Overrides:
    """Values that go before those of config.json; None leaves the checkpoint's own.

    `block_size` (tokens) and `mask_token_id` are the drafter's; `sliding_window` keeps or drops the window of
    sliding layers, which some configs leave open; `tap_ids` says whether the checkpoint's tap ids name layers by
    their output (z-lab: id i is the output of layer i) or by their input (id i is the input of layer i);
    `rope_theta` is the base of the rotary embedding.
    """

    block_size: int | None = None
    mask_token_id: int | None = None
    sliding_window: bool | None = None
    tap_ids: TapIds | None = None
    rope_theta: float | None = None


NO_OVERRIDES = Overrides()
