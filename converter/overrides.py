"""What a user says where a checkpoint is silent, or wrong."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Overrides:
    """Values that go before those of config.json; None leaves the checkpoint's own.

    `block_size` (tokens) and `mask_token_id` are the drafter's; `sliding_window` keeps or drops the window of
    sliding layers, which some configs leave open.
    """

    block_size: int | None = None
    mask_token_id: int | None = None
    sliding_window: bool | None = None


NO_OVERRIDES = Overrides()
