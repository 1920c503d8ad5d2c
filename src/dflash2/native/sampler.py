"""llama.cpp's sampler chain, run sampler by sampler on a row of logits that numpy holds.

`llama_sampler_sample` would kill the interpreter where a grammar leaves no token; here that raises SamplingError, and a
token is accepted by the chain only after it came out of it.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

from dflash2.errors import SamplingError
from dflash2.native.batch import FloatArray, IntArray
from dflash2.native.loader import library

CUSTOM = "custom"
_GRAMMAR, _TOP_K = "grammar", "top-k"
_INERT = "?"  # how llama.cpp marks a sampler that was made with a neutral argument
_TOKEN_DATA = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
_LEAST_SHARE = 16  # a top-k below vocabulary / this is worth finding its candidates first


class Candidates(NamedTuple):
    """Tokens a chain left and their logits, both [m], in no order; views that the next row overwrites."""

    ids: IntArray
    logits: FloatArray


class TokenArray:
    """llama.cpp's `llama_token_data_array` over one buffer, for rows of at most `n_vocab` tokens."""

    def __init__(self, n_vocab: int) -> None:
        library()
        module = import_module("llama_cpp.llama_cpp")
        self.n_vocab = n_vocab
        self._ids: IntArray = np.arange(n_vocab, dtype=np.int32)
        self._data = np.zeros(n_vocab, _TOKEN_DATA)
        self._memory = (module.llama_token_data * n_vocab).from_address(self._data.ctypes.data)
        self._struct = module.llama_token_data_array(self._memory, n_vocab, -1, False)
        self.pointer = module.llama_token_data_array_p(self._struct)

    def fill(self, logits: FloatArray, ids: IntArray | None = None) -> None:
        """Hold `logits` [m] of tokens `ids` [m], by default of the whole vocabulary."""
        m = len(logits)
        self._data["id"][:m] = self._ids if ids is None else ids
        self._data["logit"][:m] = logits
        struct = self._struct
        struct.data, struct.size, struct.selected, struct.sorted = self._memory, m, -1, False

    def candidates(self) -> Candidates:
        """What is held now."""
        data = self._data[: self._struct.size]
        return Candidates(data["id"], data["logit"])

    def drop_forbidden(self) -> None:
        """Forget tokens of logit -inf: they have no probability, and later samplers stumble over them."""
        data = self._data[: self._struct.size]
        kept = data[data["logit"] > -np.inf]
        self._data[: len(kept)] = kept
        self._struct.size = len(kept)

    @property
    def selected(self) -> tuple[int, float]:
        """Token and logit that the last sampler selected; (-1, -inf) if it selected none."""
        at = self._struct.selected
        if not 0 <= at < self._struct.size:
            return -1, -np.inf
        return int(self._data["id"][at]), float(self._data["logit"][at])


class SamplerChain:
    """The chain of a `llama_cpp` `LlamaSampler`, which stays its owner.

    Attributes:
        names: the samplers in order, by llama.cpp's names ("?name": made without effect; "custom": in Python).
        n_vocab: length of the rows.
    """

    def __init__(self, sampler: Any, tokens: TokenArray) -> None:
        module = import_module("llama_cpp.llama_cpp")
        self._owner = sampler
        self._tokens = tokens
        self.n_vocab = tokens.n_vocab
        self._accept = module.llama_sampler_accept
        custom = dict(sampler.custom_samplers)
        names, self._stages = [], list[tuple[str, Callable[[Any], object]]]()
        for i in range(module.llama_sampler_chain_n(sampler.sampler)):
            if i in custom:  # called directly, so that an exception of a logits processor reaches the caller
                name, stage = CUSTOM, custom[i].apply_func
            else:
                pointer = module.llama_sampler_chain_get(sampler.sampler, i)
                name = module.llama_sampler_name(pointer).decode()
                stage = _applies(module.llama_sampler_apply, pointer)
            names.append(name)
            if not name.startswith(_INERT):
                self._stages.append((name, stage))
        self.names = tuple(names)
        self._k = self._leading_top_k()

    def _leading_top_k(self) -> int | None:
        """K if the first sampler with any effect is a top-k much smaller than the vocabulary: asked by running it."""
        if self._stages[0][0] != _TOP_K or len(self._stages) < 2:
            return None
        self._tokens.fill(np.zeros(self._tokens.n_vocab, np.float32))
        self._stages[0][1](self._tokens.pointer)
        k = len(self._tokens.candidates().ids)
        return k if k < self._tokens.n_vocab // _LEAST_SHARE else None

    def candidates(self, logits: FloatArray) -> Candidates:
        """What the chain leaves of `logits` [vocabulary] before its last sampler draws from it.

        The distribution is softmax of the candidates' logits. Raises SamplingError if no token is left.
        """
        self._load(logits)
        for name, stage in self._stages[:-1]:
            stage(self._tokens.pointer)
            if name == _GRAMMAR:
                self._tokens.drop_forbidden()
                if not len(self._tokens.candidates().ids):
                    raise _nothing_left()
        return self._tokens.candidates()

    def sample(self, logits: FloatArray) -> int:
        """The token the whole chain selects, exactly as `llama_sampler_sample`; not accepted yet.

        Raises SamplingError if no token is left.
        """
        self._tokens.fill(logits)
        for _, stage in self._stages:
            stage(self._tokens.pointer)
        token, logit = self._tokens.selected
        if not logit > -np.inf:
            raise _nothing_left()
        return token

    def accept(self, token: int) -> None:
        """Tell penalties and grammar that `token`, which `candidates` or `sample` gave, is emitted."""
        self._accept(self._owner.sampler, token)

    def _load(self, logits: FloatArray) -> None:
        if self._k is None:
            self._tokens.fill(logits)
        else:
            ids = top_candidates(logits, self._k)
            self._tokens.fill(logits[ids], ids)


def _applies(function: Any, pointer: Any) -> Callable[[Any], object]:
    def apply(tokens: Any) -> object:
        return function(pointer, tokens)

    return apply


def _nothing_left() -> SamplingError:
    return SamplingError(
        "no token is left to choose from: the grammar, or a logits processor, forbids the whole vocabulary here; "
        "check that the grammar can end and that this model has an end-of-text token."
    )


def top_candidates(logits: FloatArray, k: int) -> IntArray:
    """Ids of at least the `k` largest of `logits` [vocabulary], ties included, and a few more; in order of id.

    The k-th largest of many groups' maxima is a lower bound of the k-th largest logit.
    """
    groups = max(4 * k, 512)
    rows = len(logits) // groups
    if rows < 2:
        return np.arange(len(logits), dtype=np.int32)
    maxima = logits[: rows * groups].reshape(rows, groups).max(axis=0)
    bound = np.partition(maxima, groups - k)[groups - k]
    return np.flatnonzero(~(logits < bound)).astype(np.int32)
