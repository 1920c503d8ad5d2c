"""One llama.cpp context: batches in, rows out.

Arrays go in and come out; views on llama.cpp's buffers are valid until the next decode of the same context.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from dflash2.errors import NativeError
from dflash2.native.batch import SEQUENCE, Batch, Bytes, FloatArray, IntArray
from dflash2.native.loader import function, llama, require_symbols
from dflash2.native.model import Model
from dflash2.native.observe import Observer
from dflash2.native.options import ContextOptions, Outputs

# `LLAMA_STATE_SEQ_FLAGS_*`: everything, or only what cannot be cut at a position.
_WHOLE, _PART = 0, 1
_FEW = 16  # tokens, whose least and largest a list gives sooner than an array


class Context:
    """One llama.cpp context, sequence 0 of it.

    Facts about the last decode are kept, so that reading what was not computed raises instead of aborting.
    """

    def __init__(self, pointer: Any, *, feature_width: int = 0) -> None:
        """Wrap a context made elsewhere (`Context.open` makes one); `feature_width` floats per injected row."""
        module, _ = llama()
        require_symbols()
        model = module.llama_get_model(pointer)
        self._pointer = pointer
        self._owned = False
        self._observer: Observer | None = None
        self._memory = module.llama_get_memory(pointer)
        self._seq_rm = module.llama_memory_seq_rm
        self._decode = module.llama_decode
        self._get_logits = module.llama_get_logits
        self.n_ctx: int = module.llama_n_ctx(pointer)
        self.n_batch: int = module.llama_n_batch(pointer)
        self.n_ubatch: int = module.llama_n_ubatch(pointer)
        self.n_layer: int = module.llama_model_n_layer(model)
        self.n_embd: int = module.llama_model_n_embd(model)
        self.n_vocab: int = module.llama_vocab_n_tokens(module.llama_model_get_vocab(model))
        # Snapshots a recurrent state keeps: tokens it can step back; None for a memory that steps back freely.
        recurrent = module.llama_model_is_recurrent(model) or module.llama_model_is_hybrid(model)
        self.snapshots: int | None = module.llama_n_rs_seq(pointer) if recurrent else None
        # Positions that sliding layers look back, 0 without such layers.
        self.window: int = module.llama_model_n_swa(model)
        self._last = (0, 0)  # positions of the last decode: first, and one beyond the last
        self._causal = True
        self._nextn = False
        self._taps: tuple[int, ...] = ()
        self._rows = self._outputs = self._tapped_rows = 0
        self._views: dict[tuple[int, int, int], FloatArray] = {}
        self._batch = Batch(module, self.n_batch, feature_width)

    @classmethod
    def open(
        cls,
        model: Model,
        options: ContextOptions,
        *,
        other: Context | None = None,
        feature_width: int = 0,
        observer: Observer | None = None,
    ) -> Context:
        """Make a context that `close` frees; `other` is the target's, whose embeddings and head a drafter shares.

        `observer` sees every operation that it computes.
        """
        params = _parameters(options)
        if other is not None:
            params.ctx_other = other._pointer
        return cls._made(model._pointer, params, observer, feature_width)

    @classmethod
    def _made(cls, model: Any, params: Any, observer: Observer | None, feature_width: int = 0) -> Context:
        if observer is not None:
            observer.attach(params)
        pointer = llama()[0].llama_init_from_model(model, params)
        if not pointer:
            raise NativeError("llama.cpp cannot create a context; its log says why (verbose=True shows it).")
        context = cls(pointer, feature_width=feature_width)
        context._owned = True
        context._observer = observer  # what llama.cpp calls must live as long as the context
        return context

    def beside(self, options: ContextOptions, observer: Observer | None = None) -> Context:
        """Make another context on the weights of this one, to be closed before them; its memory is its own.

        `observer` sees every operation that it computes.
        """
        if self._pointer is None:
            _closed()
        return self._made(llama()[0].llama_get_model(self._pointer), _parameters(options), observer)

    def close(self) -> None:
        """Free the context if this object made it; later calls raise NativeError."""
        if self._owned and self._pointer:
            llama()[0].llama_free(self._pointer)
        self._pointer = None
        self.drop_rows()
        self._decode = self._seq_rm = self._get_logits = _closed
        self._views.clear()

    def set_causal(self, causal: bool) -> None:
        """Let a row see later rows of its batch (`causal=False`) or not."""
        llama()[0].llama_set_causal_attn(self._pointer, causal)
        self._causal = causal

    def output_lattice(self) -> None:
        """Keep the selector's rows of every decode, whatever rows are outputs (see `lattice`)."""
        function("llama_set_embeddings_nextn")(self._pointer, True, False)
        self._nextn = True

    def tap(self, layers: Sequence[int]) -> None:
        """Keep the inputs of these layers at every decode; raises NativeError for a layer the model lacks."""
        if self._pointer is None:
            _closed()
        for layer in (*self._taps, *layers):
            if not 0 <= layer <= self.n_layer:
                raise NativeError(f"layer {layer} cannot be tapped: the target has {self.n_layer} layers.")
        switch = function("llama_set_embeddings_layer_inp")
        for layer in self._taps:
            switch(self._pointer, layer, False)
        for layer in layers:
            switch(self._pointer, layer, True)
        self._taps = tuple(layers)
        self._tapped_rows = 0

    def decode_tokens(self, tokens: IntArray, start: int, outputs: Outputs) -> None:
        """Evaluate `tokens` [n] at positions `start`...; raises NativeError, then memory is as `truncate` leaves it."""
        n = len(tokens)
        self._check_rows(n)
        self.check_tokens(tokens)
        self._run(self._batch.of_tokens(tokens, start, outputs), start, n)
        self._outputs = n if outputs is Outputs.ALL else int(outputs is Outputs.LAST)

    def check_tokens(self, tokens: IntArray) -> None:
        """Raise NativeError unless all `tokens` [n], n > 0, are in the vocabulary."""
        ends = tokens.tolist() if len(tokens) <= _FEW else (tokens.min(), tokens.max())
        if min(ends) < 0 or max(ends) >= self.n_vocab:
            raise NativeError(f"token ids must lie in 0..{self.n_vocab - 1}, got {min(ends)}..{max(ends)}.")

    def decode_features(self, features: FloatArray, start: int) -> None:
        """Inject `features` [n, feature_width] at positions `start`...; raises NativeError."""
        n = len(features)
        self._check_rows(n)
        if features.shape[1] != self._batch.feature_width or not features.flags.c_contiguous:
            raise NativeError(f"features must be contiguous [n, {self._batch.feature_width}], got {features.shape}.")
        self._run(self._batch.of_features(features, start), start, n)
        self._outputs = self._rows = 0

    def _check_rows(self, n: int) -> None:
        limit = self.n_batch if self._causal else min(self.n_batch, self.n_ubatch)
        if not 0 < n <= limit:
            raise NativeError(f"a batch of {n} rows does not fit: this context takes 1 to {limit}; raise n_batch.")

    def _run(self, batch: Any, start: int, n: int) -> None:
        self.drop_rows()
        status = self._decode(self._pointer, batch)
        if status != 0:
            reason = {1: "its memory is full", 2: "it was aborted", -1: "the batch is invalid"}.get(status, "it failed")
            raise NativeError(f"llama.cpp could not evaluate {n} rows: {reason} (status {status}).")
        self._rows = n
        self._last = (start, start + n)
        self._tapped_rows = n if self._taps else 0

    def adopt(self) -> bool:
        """Take over the logits of a batch that someone else decoded in this context; False if it computed none."""
        self.replaced()
        module, _ = llama()
        first, last = module.llama_get_logits(self._pointer), module.llama_get_logits_ith(self._pointer, -1)
        if first and last:
            distance = ctypes.addressof(last.contents) - ctypes.addressof(first.contents)
            self._outputs = distance // (ctypes.sizeof(ctypes.c_float) * self.n_vocab) + 1
        return self._outputs > 0

    def replaced(self) -> None:
        """Note that someone else changed this context's memory: nothing of the last decode holds any more."""
        if self._pointer is None:
            _closed()
        self.drop_rows()
        end = self._position(llama()[0].llama_memory_seq_pos_max) + 1
        self._last = (end, end)

    @property
    def graphs_built(self) -> int | None:
        """Graphs this context built so far, those used again left out; None in a library that does not count."""
        count = getattr(llama()[0]._lib, "dflash2_graph_rebuilds", None)
        if count is None:
            return None
        count.restype, count.argtypes = ctypes.c_int64, [ctypes.c_void_p]
        return int(count(self._pointer))

    @property
    def has_logits(self) -> bool:
        """Whether `logits` returns anything."""
        return self._outputs > 0

    def drop_rows(self) -> None:
        """Forget what the last decode computed: it is not certain any more what its rows stand for."""
        self._rows = self._outputs = self._tapped_rows = 0

    def logits(self) -> FloatArray:
        """View [rows marked as outputs, n_vocab] of the last decode, in batch order."""
        if self._outputs == 0:
            if self._pointer is None:
                _closed()
            raise NativeError("the last batch computed no logits.")
        return self._view(ctypes.addressof(self._get_logits(self._pointer).contents), self._outputs, self.n_vocab)

    def lattice(self) -> FloatArray:
        """View [rows of the last token decode, n_embd]: what the selector wrote for each row.

        K ids and K x K scores; stock llama.cpp fills the rest with zeros and the first row with the anchor's scores K
        times (layout 1), a patched one writes neither, nor the anchor's own row (layout 2): nobody may read them.
        """
        if not self._nextn or self._rows == 0:
            raise NativeError("the last batch computed no selector rows.")
        return self._view(function("llama_get_embeddings_nextn")(self._pointer), self._rows, self.n_embd)

    def layer_inputs(self, first: int, out: FloatArray) -> FloatArray:
        """Copy rows `first`... of the tapped layers of the last decode into `out` [n, taps * n_embd]; returns it."""
        n = len(out)
        if first < 0 or first + n > self._tapped_rows or out.shape[1] != len(self._taps) * self.n_embd:
            raise NativeError(
                f"rows {first}..{first + n} of the tapped layers were not computed: {self._tapped_rows} rows of "
                f"{len(self._taps)} layers are there."
            )
        read = function("llama_get_embeddings_layer_inp")
        for k, layer in enumerate(self._taps):
            rows = self._view(read(self._pointer, layer), self._tapped_rows, self.n_embd)
            out[:, k * self.n_embd : (k + 1) * self.n_embd] = rows[first : first + n]
        return out

    def _view(self, address: int, rows: int, width: int) -> FloatArray:
        """Array over llama.cpp's buffer; cached, since making one costs more than the reads of a cycle."""
        key = (address, rows, width)
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= 64:  # addresses change only when llama.cpp moves its output buffer
                self._views.clear()
            buffer = (ctypes.c_float * (rows * width)).from_address(address)
            view = self._views[key] = np.ctypeslib.as_array(buffer).reshape(rows, width)
        return view

    def truncate(self, length: int) -> bool:
        """Drop positions `length` and later; False if the memory cannot (then nothing was dropped)."""
        if self.snapshots is None:
            return bool(self._seq_rm(self._memory, SEQUENCE, length, -1))
        end = self._position(llama()[0].llama_memory_seq_pos_max) + 1
        if not 0 < length < end:
            return bool(self._seq_rm(self._memory, SEQUENCE, length, -1))
        # llama.cpp counts snapshots back from the last position, but a decode writes no more of them than it has
        # rows: those further back are of earlier decodes, and it would take them without a word.
        first, last = self._last
        if end != last or length <= first or not self._seq_rm(self._memory, SEQUENCE, length, -1):
            return False
        self._last = (first, length)
        return True

    def reaches(self, length: int) -> bool:
        """Whether all that a token at position `length` looks at is still in memory (sliding layers forget)."""
        if self.window == 0 or self.snapshots is not None or length == 0:
            return True
        oldest = self._position(llama()[0].llama_memory_seq_pos_min)
        return 0 <= oldest <= max(0, length - self.window + 1)

    def _position(self, query: Any) -> int:
        if self._pointer is None:
            _closed()
        return int(query(self._memory, SEQUENCE))

    def save(self) -> Bytes:
        """Copy of everything in memory, for `restore`."""
        return self._save(_WHOLE)

    def restore(self, state: Bytes | bytes) -> None:
        """Replace memory by what `save` of an equal context returned; raises NativeError if it does not fit."""
        self._restore(state, _WHOLE)

    def save_part(self) -> Bytes:
        """Copy of what `truncate` cannot bring back: recurrent states, and the window of sliding layers."""
        return self._save(_PART)

    def restore_part(self, state: Bytes, length: int) -> None:
        """Go back to `length` positions, at which `save_part` was called; raises NativeError if it does not fit."""
        self._restore(state, _PART)
        if not self.truncate(length):
            raise NativeError(f"the memory cannot be cut to the {length} positions of its saved part.")

    def _save(self, flags: int) -> Bytes:
        module, _ = llama()
        if self._pointer is None:
            _closed()
        size = module.llama_state_seq_get_size_ext(self._pointer, SEQUENCE, flags)
        state = np.empty(size, np.uint8)
        written = module.llama_state_seq_get_data_ext(self._pointer, _bytes_of(state), size, SEQUENCE, flags)
        if written != size:
            raise NativeError(f"llama.cpp saved {written} of {size} bytes of its memory.")
        return state

    def _restore(self, saved: Bytes | bytes, flags: int) -> None:
        if self._pointer is None:
            _closed()
        state = np.frombuffer(saved, np.uint8)
        self.drop_rows()
        if not llama()[0].llama_state_seq_set_data_ext(self._pointer, _bytes_of(state), state.size, SEQUENCE, flags):
            raise NativeError("the saved state does not fit this context; use the same model and n_ctx.")
        end = self._position(llama()[0].llama_memory_seq_pos_max) + 1
        self._last = (end, end)

    def clear(self) -> None:
        """Drop everything; works for every kind of memory."""
        if self._pointer is None:
            _closed()
        llama()[0].llama_memory_clear(self._memory, True)
        self._last = (0, 0)


def _parameters(options: ContextOptions) -> Any:
    """llama.cpp's defaults with what `options` say."""
    params = llama()[0].llama_context_default_params()
    for name in ContextOptions.__dataclass_fields__:
        value = getattr(options, name)
        if value is not None:
            setattr(params, name, value)
    return params


def _bytes_of(state: Bytes) -> Any:
    return state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))


def _closed(*_: object) -> Any:
    raise NativeError("this model is closed; make a new object.")
