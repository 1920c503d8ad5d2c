"""`dflash2.evidence`'s numpy chain with a grammar in its place, by the names of `generate`'s arguments."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from dflash2.evidence import Sampling
from dflash2.evidence.probabilities import penalised, truncated

Allowed = Callable[[tuple[int, ...]], np.ndarray]


@dataclass(frozen=True)
class Chain:
    """Arguments of `generate`; `allowed` says, after the tokens so far, which a grammar allows [vocabulary]."""

    temp: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    allowed: Allowed | None = None

    def probabilities(self, logits: np.ndarray, so_far: Sequence[int]) -> np.ndarray:
        """p [vocabulary] of the token after `so_far`, the tokens generated up to here."""
        arguments = asdict(self)
        del arguments["allowed"]
        sampling = Sampling(temperature=arguments.pop("temp"), **arguments)
        logits = penalised(sampling, logits, so_far)
        if self.allowed is not None:
            logits[~self.allowed(tuple(so_far))] = -np.inf
        return truncated(sampling, logits)
