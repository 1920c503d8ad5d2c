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
    """Arrays of one context's batches, allocated once; llama.cpp copies them during the call."""

    def __init__(self, module: Any, capacity: int, feature_width: int) -> None:
        self.feature_width = feature_width
        self._tokens = np.zeros(capacity, np.int32)
        self._positions = np.zeros(capacity * _POSITIONS_PER_FEATURE, np.int32)
        self._steps = np.arange(capacity, dtype=np.int32)
        self._n_sequences = np.ones(capacity, np.int32)
        self._sequence = np.full(1, SEQUENCE, np.int32)
        self._sequences = np.full(capacity + 1, self._sequence.ctypes.data, np.uintp)
        self._outputs = np.zeros(capacity, np.int8)
        self._features_at = 0
        self._of_tokens, self._of_features = module.llama_batch(), module.llama_batch()
        for batch in (self._of_tokens, self._of_features):
            batch.pos = _pointer(self._positions, ctypes.c_int32)
            batch.n_seq_id = _pointer(self._n_sequences, ctypes.c_int32)
            batch.seq_id = _pointer(self._sequences, ctypes.POINTER(ctypes.c_int32))
            batch.logits = _pointer(self._outputs, ctypes.c_int8)
        self._of_tokens.token = _pointer(self._tokens, ctypes.c_int32)

    def of_tokens(self, tokens: IntArray, start: int, outputs: Outputs) -> Any:
        """A batch of `tokens` [n] at positions `start`...; valid until the next one."""
        n = len(tokens)
        self._tokens[:n] = tokens
        np.add(self._steps[:n], start, out=self._positions[:n])
        self._outputs[:n] = outputs is Outputs.ALL
        if outputs is Outputs.LAST:
            self._outputs[n - 1] = 1
        self._of_tokens.n_tokens = n
        return self._of_tokens

    def of_features(self, features: FloatArray, start: int) -> Any:
        """A batch of `features` [n, feature_width] at positions `start`...; valid until the next one."""
        n = len(features)
        sections = self._positions[: n * _POSITIONS_PER_FEATURE].reshape(_POSITIONS_PER_FEATURE, n)
        np.add(self._steps[:n], start, out=sections[0])
        sections[1:3] = sections[0]
        sections[3] = 0
        self._outputs[:n] = 0
        address = features.__array_interface__["data"][0]
        if address != self._features_at:  # nearly always the session's buffer: making pointers is slow
            self._of_features.embd, self._features_at = _pointer(features, ctypes.c_float), address
        self._of_features.n_tokens = n
        return self._of_features


def _pointer(array: npt.NDArray[Any], kind: Any) -> Any:
    return ctypes.cast(array.ctypes.data, ctypes.POINTER(kind))
