"""Tiny random checkpoints of each published layout; their weights are the z-lab ones under that layout's names."""

from collections.abc import Mapping

import numpy as np
from factories import drafter_tensors


def lively_tensors(config: Mapping, seed: int = 0) -> dict[str, np.ndarray]:
    """Weights of a z-lab `config` large enough that every rule of a dialect shows: norms near 1, sharp attention."""
    random = np.random.default_rng(seed + 1000)
    tensors = drafter_tensors(config, seed)
    for name, values in tensors.items():
        if name.endswith("norm.weight"):
            sharp = 2.0 if name.endswith(("q_norm.weight", "k_norm.weight")) else 1.0
            tensors[name] = (sharp + random.normal(0, 0.2, values.shape)).astype(np.float32)
    return tensors
