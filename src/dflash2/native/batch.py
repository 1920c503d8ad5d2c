"""Arrays of the batches that llama.cpp evaluates."""

from __future__ import annotations

import ctypes
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from dflash2.native.options import Outputs

IntArray: TypeAlias = npt.NDArray[np.int32]
FloatArray: TypeAlias = npt.NDArray[np.float32]
Bytes: TypeAlias = npt.NDArray[np.uint8]

SEQUENCE = 0  # the only sequence of a context of ours
_POSITIONS_PER_FEATURE = 4  # M-RoPE: (p, p, p, 0); other drafters read the first section only


class Batch:
    """Arrays of one context's batches, allocated once; llama.cpp copies them during the call.

    ctypes arrays where a few numbers are written every cycle: each call into numpy costs as much as all of these.
    """

    def __init__(self, module: Any, capacity: int, feature_width: int) -> None:
        self.feature_width = feature_width
        self._tokens = np.zeros(capacity, np.int32)
        self._positions = (ctypes.c_int32 * (capacity * _POSITIONS_PER_FEATURE))()
        self._n_sequences = np.ones(capacity, np.int32)
        self._sequence = np.full(1, SEQUENCE, np.int32)
        self._sequences = np.full(capacity + 1, self._sequence.ctypes.data, np.uintp)
        self._flags = {
            Outputs.NONE: np.zeros(capacity, np.int8),
            Outputs.ALL: np.ones(capacity, np.int8),
            Outputs.LAST: np.zeros(capacity, np.int8),
        }
        self._outputs = {outputs: _pointer(flags, ctypes.c_int8) for outputs, flags in self._flags.items()}
        self._features_at = 0
        self._of_tokens, self._of_features = module.llama_batch(), module.llama_batch()
        for batch in (self._of_tokens, self._of_features):
            batch.pos = ctypes.cast(self._positions, ctypes.POINTER(ctypes.c_int32))
            batch.n_seq_id = _pointer(self._n_sequences, ctypes.c_int32)
            batch.seq_id = _pointer(self._sequences, ctypes.POINTER(ctypes.c_int32))
        self._of_tokens.token = _pointer(self._tokens, ctypes.c_int32)
        self._of_features.logits = self._outputs[Outputs.NONE]

    def of_tokens(self, tokens: IntArray, start: int, outputs: Outputs) -> Any:
        """A batch of `tokens` [n] at positions `start`...; valid until the next one."""
        n = len(tokens)
        self._tokens[:n] = tokens
        self._positions[:n] = [*range(start, start + n)]
        if outputs is Outputs.LAST:
            last = self._flags[outputs]
            last[: n - 1] = 0
            last[n - 1] = 1
        self._of_tokens.logits = self._outputs[outputs]
        self._of_tokens.n_tokens = n
        return self._of_tokens

    def of_features(self, features: FloatArray, start: int) -> Any:
        """A batch of `features` [n, feature_width] at positions `start`...; valid until the next one."""
        n = len(features)
        self._positions[: n * _POSITIONS_PER_FEATURE] = [*range(start, start + n)] * 3 + [0] * n
        address = features.__array_interface__["data"][0]
        if address != self._features_at:  # nearly always the session's buffer: making pointers is slow
            self._of_features.embd, self._features_at = _pointer(features, ctypes.c_float), address
        self._of_features.n_tokens = n
        return self._of_features


def _pointer(array: npt.NDArray[Any], kind: Any) -> Any:
    return ctypes.cast(array.ctypes.data, ctypes.POINTER(kind))
