"""Biases of a drafter's attention (gpt-oss): llama.cpp's dflash loader has no slot for them.

Zero biases are left out, which is exact. No other can be folded into what the graph has: q and k pass an RMS norm
right after the addition, and what v and o add to the residual is a constant vector, for which there is no tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dflash2.converter.sources import Source
from dflash2.errors import CheckpointError, UnsupportedCheckpointError

_NORMED = "an RMS norm follows the addition, so it cannot be folded into a weight"
_CONSTANT = "it adds a constant vector to the residual, for which llama.cpp's dflash graph has no tensor"
_REASONS = {"q": _NORMED, "k": _NORMED, "v": _CONSTANT, "o": _CONSTANT}


def zero_biases(folder: Path, layers: int, stored: Mapping[str, Source]) -> tuple[set[str], tuple[str, ...]]:
    """Names of the biases of the checkpoint in `folder`, all of them zero, and a note that says so.

    Raises CheckpointError if one is missing, UnsupportedCheckpointError naming the first that is not zero.
    """
    names = {
        f"layers.{layer}.self_attn.{part}_proj.bias": reason
        for layer in range(layers)
        for part, reason in _REASONS.items()
    }
    for name, reason in names.items():
        if name not in stored:
            raise CheckpointError(
                f"{folder} lacks the tensor {name!r}, which 'attention_bias' true implies; download it again."
            )
        source = stored[name]
        if len(source.shape) != 1 or source.rows(0, 1).any():
            raise UnsupportedCheckpointError(
                f"{source.label} is a bias that is not zero: {reason}. Draft with a drafter trained without"
                " 'attention_bias'."
            )
    return set(names), (f"{len(names)} attention biases left out: all of them are zero.",)
