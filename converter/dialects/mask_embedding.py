"""The mask token's own embedding (MiMo): a file beside the weights, for a row the target never trained."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dflash2.converter.dialects.torch_file import read_torch_file
from dflash2.errors import CheckpointError

FILE = "mask_embedding.pt"
_ID, _VECTOR = "mask_token_id", "embedding"


def read_mask_embedding(folder: Path, mask_token_id: int, hidden_size: int) -> tuple[float, ...] | None:
    """The vector [hidden_size] of `folder`'s mask_embedding.pt, None without such a file.

    The file holds a dictionary of `mask_token_id` and `embedding`, or the bare vector. Raises CheckpointError if it
    holds anything else or belongs to another mask token.
    """
    path = folder / FILE
    if not path.exists():
        return None
    saved = read_torch_file(path)
    vector = saved
    if isinstance(saved, dict):
        if saved.get(_ID) != mask_token_id:
            raise CheckpointError(
                f"{path} is for the mask token {saved.get(_ID)!r}, config.json names {mask_token_id}; download both."
            )
        vector = saved.get(_VECTOR)
    if not isinstance(vector, np.ndarray) or vector.size != hidden_size or vector.dtype.kind != "f":
        raise CheckpointError(f"{path} has no vector of {hidden_size} numbers, the drafter's 'hidden_size'.")
    values = vector.astype(np.float32).reshape(-1)
    if not np.isfinite(values).all():
        raise CheckpointError(f"{path} has values that are infinite or not a number; download it again.")
    return tuple(values.tolist())
