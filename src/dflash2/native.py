"""The only ctypes: finds the llama.cpp library, declares the symbols llama_cpp does not, and checks before calling.

A failed GGML_ASSERT kills the interpreter, so every wrapper here checks what llama.cpp would assert and raises
NativeError instead. Arrays go in and come out; views on llama.cpp's buffers are valid until the next decode of the
same context. Signatures: `include/llama.h` and `src/llama-ext.h` of the pinned llama.cpp.
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from gguf import GGUFWriter

from dflash2.constants import DRAFTER_ARCHITECTURE, LLAMA_CPP_PYTHON_VERSION
from dflash2.errors import NativeError

IntArray: TypeAlias = npt.NDArray[np.int32]
FloatArray: TypeAlias = npt.NDArray[np.float32]

# A folder with a patched libllama; llama_cpp reads its own variable once, when it is first imported.
LIBRARY_VARIABLE = "DFLASH2_LIBRARY_PATH"
_LLAMA_CPP_VARIABLE = "LLAMA_CPP_LIB_PATH"

_SEQUENCE = 0
_POSITIONS_PER_FEATURE = 4  # M-RoPE: (p, p, p, 0); other drafters read the first section only


class _Symbol(NamedTuple):
    """One function of `llama-ext.h`: C++ linkage, so its name depends on the compiler."""

    itanium: str
    msvc: str
    result: Any
    arguments: tuple[Any, ...]


_POINTER = ctypes.c_void_p
# Came with DFlash 2; nothing here calls it.
_DFLASH2_SYMBOLS = (
    "llama_model_dflash_selector_top_k",
    "_Z33llama_model_dflash_selector_top_kPK11llama_model",
    "?llama_model_dflash_selector_top_k@@YAIPEBUllama_model@@@Z",
)
_SYMBOLS = {
    "llama_set_embeddings_layer_inp": _Symbol(
        "_Z30llama_set_embeddings_layer_inpP13llama_contextjb",
        "?llama_set_embeddings_layer_inp@@YAXPEAUllama_context@@I_N@Z",
        None,
        (_POINTER, ctypes.c_uint32, ctypes.c_bool),
    ),
    "llama_get_embeddings_layer_inp": _Symbol(
        "_Z30llama_get_embeddings_layer_inpP13llama_contextj",
        "?llama_get_embeddings_layer_inp@@YAPEAMPEAUllama_context@@I@Z",
        _POINTER,
        (_POINTER, ctypes.c_uint32),
    ),
    "llama_set_embeddings_nextn": _Symbol(
        "_Z26llama_set_embeddings_nextnP13llama_contextbb",
        "?llama_set_embeddings_nextn@@YAXPEAUllama_context@@_N1@Z",
        None,
        (_POINTER, ctypes.c_bool, ctypes.c_bool),
    ),
    "llama_get_embeddings_nextn": _Symbol(
        "_Z26llama_get_embeddings_nextnP13llama_context",
        "?llama_get_embeddings_nextn@@YAPEAMPEAUllama_context@@@Z",
        _POINTER,
        (_POINTER,),
    ),
}


@dataclass(frozen=True)
class Library:
    """The llama.cpp library in use: `path` of the file, and whether it was chosen by us (`patched`)."""

    path: Path
    patched: bool


@dataclass(frozen=True)
class Support:
    """What a library can run, found out without loading a model.

    `missing` are the functions a cycle needs and it lacks, `drafters` the newest kind of drafter it loads: 0 none,
    1 DFlash, 2 DFlash 2.
    """

    library: Library
    version: str
    missing: tuple[str, ...]
    drafters: int


@dataclass(frozen=True)
class Placement:
    """Where the weights of a model go; the fields are llama.cpp's model parameters of the same names."""

    n_gpu_layers: int = 0
    split_mode: int = 1
    main_gpu: int = 0
    tensor_split: tuple[float, ...] | None = None
    load_mode: int | None = None


@dataclass(frozen=True)
class AttentionOptions:
    """How keys and values are kept and read; the fields are llama.cpp's context parameters of the same names."""

    flash_attn_type: int
    type_k: int
    type_v: int


@dataclass(frozen=True)
class ContextOptions:
    """Parameters of a context (llama.cpp's names, sizes in tokens); the rest stays at llama.cpp's own defaults."""

    n_ctx: int
    n_batch: int
    n_ubatch: int
    n_threads: int
    n_threads_batch: int
    n_rs_seq: int = 0
    offload_kqv: bool = True
    op_offload: bool = True
    flash_attn_type: int | None = None
    swa_full: bool = False
    type_k: int | None = None
    type_v: int | None = None


class Outputs(Enum):
    """Which rows of a batch get logits."""

    NONE = "none"
    LAST = "last"
    ALL = "all"


def _prefer_patched_library() -> bool:
    """Point llama_cpp at a patched library before its first import; False if there is none, or it is too late."""
    folder = os.environ.get(LIBRARY_VARIABLE)
    if not folder or "llama_cpp" in sys.modules or _LLAMA_CPP_VARIABLE in os.environ:
        return False
    os.environ[_LLAMA_CPP_VARIABLE] = folder
    return True


@cache
def _llama() -> tuple[Any, Library]:
    """The module `llama_cpp.llama_cpp` with its library loaded."""
    patched = _prefer_patched_library()
    try:
        module = import_module("llama_cpp.llama_cpp")
    except (ImportError, RuntimeError, OSError) as error:
        raise NativeError(
            f"llama-cpp-python cannot be loaded ({error}); install llama-cpp-python {LLAMA_CPP_PYTHON_VERSION}."
        ) from error
    return module, Library(Path(module._lib._name), patched)


def library() -> Library:
    """Load llama.cpp if need be and say which library is in use; raises NativeError if there is none."""
    return _llama()[1]


@cache
def _function(name: str) -> Any:
    """A function of `llama-ext.h` under its plain, Itanium or MSVC name."""
    module, loaded = _llama()
    symbol = _SYMBOLS[name]
    for exported in (name, symbol.itanium, symbol.msvc):
        function = getattr(module._lib, exported, None)
        if function is not None:
            function.restype, function.argtypes = symbol.result, list(symbol.arguments)
            return function
    raise NativeError(
        f"{loaded.path} (llama-cpp-python {version('llama-cpp-python')}) does not export {name}, which DFlash needs; "
        f"install llama-cpp-python {LLAMA_CPP_PYTHON_VERSION}."
    )


def require_symbols() -> None:
    """Raise NativeError, naming the first one missing, unless the library exports every symbol DFlash needs."""
    for name in _SYMBOLS:
        _function(name)


def support() -> Support:
    """What the library at hand can run; raises NativeError if there is none."""
    module, loaded = _llama()
    missing = tuple(name for name in _SYMBOLS if not _exported(name))
    drafters = 0
    if knows_architecture(DRAFTER_ARCHITECTURE):
        drafters = 2 if any(hasattr(module._lib, name) for name in _DFLASH2_SYMBOLS) else 1
    return Support(loaded, version("llama-cpp-python"), missing, drafters)


def _exported(name: str) -> bool:
    try:
        _function(name)
    except NativeError:
        return False
    return True


@cache
def knows_architecture(name: str) -> bool:
    """Whether the library loads models of this GGUF architecture; raises NativeError if there is no library.

    Asked by loading the vocabulary of a file that has none: it fails for an unknown architecture alone.
    """
    module, _ = _llama()
    logger = import_module("llama_cpp._logger")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "probe.gguf"
        writer = GGUFWriter(path, name)
        writer.add_tokenizer_model("no_vocab")
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        parameters = module.llama_model_default_params()
        parameters.vocab_only, parameters.n_gpu_layers = True, 0
        module.llama_log_set(_quiet(), None)
        try:
            model = module.llama_model_load_from_file(os.fsencode(path), parameters)
        finally:
            module.llama_log_set(logger.llama_log_callback, None)
    if model:
        module.llama_model_free(model)
    return bool(model)


@cache
def _quiet() -> Any:
    """A log callback that drops everything; kept, since llama.cpp keeps its address."""
    return _llama()[0].llama_log_callback(lambda *_: None)


def silence() -> None:
    """Keep llama.cpp's log to errors, as `Llama(verbose=False)` does."""
    _llama()
    import_module("llama_cpp._logger").set_verbose(False)


@cache
def repacking_is_safe() -> bool:
    """Whether weights may be kept in the CPU backend's own layouts (llama.cpp's `use_extra_bufts`).

    Not in a library with AMX kernels: built by gcc, they crash on quantised weights (llama.cpp PR 26954).
    """
    return b"AMX_INT8 = 1" not in _llama()[0].llama_print_system_info()


class Model:
    """A loaded model that this object owns."""

    def __init__(self, path: Path, placement: Placement) -> None:
        """Load the GGUF at `path`; raises NativeError if llama.cpp refuses it."""
        module, _ = _llama()
        module.llama_backend_init()
        params = module.llama_model_default_params()
        params.use_extra_bufts = repacking_is_safe()
        params.n_gpu_layers = placement.n_gpu_layers
        params.split_mode = placement.split_mode
        params.main_gpu = placement.main_gpu
        if placement.load_mode is not None:
            params.load_mode = placement.load_mode
        if placement.tensor_split is not None:
            self._tensor_split = (ctypes.c_float * module.LLAMA_MAX_DEVICES)(*placement.tensor_split)
            params.tensor_split = self._tensor_split
        self._pointer = module.llama_model_load_from_file(str(path).encode(), params)
        if not self._pointer:
            raise NativeError(f"llama.cpp cannot load {path}; its log says why (verbose=True shows it).")

    def close(self) -> None:
        """Free the model; contexts made from it must be closed first."""
        if self._pointer:
            _llama()[0].llama_model_free(self._pointer)
            self._pointer = None


class Context:
    """One llama.cpp context, sequence 0 of it.

    Facts about the last decode are kept, so that reading what was not computed raises instead of aborting.
    """

    def __init__(self, pointer: Any, *, feature_width: int = 0) -> None:
        """Wrap a context made elsewhere (`Context.open` makes one); `feature_width` floats per injected row."""
        module, _ = _llama()
        require_symbols()
        model = module.llama_get_model(pointer)
        self._pointer = pointer
        self._owned = False
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
        self._causal = True
        self._nextn = False
        self._taps: tuple[int, ...] = ()
        self._rows = self._outputs = self._tapped_rows = 0
        self._views: dict[tuple[int, int, int], FloatArray] = {}
        self._batch = _Batch(module, self.n_batch, feature_width)

    @classmethod
    def open(
        cls, model: Model, options: ContextOptions, *, other: Context | None = None, feature_width: int = 0
    ) -> Context:
        """Make a context that `close` frees; `other` is the target's, whose embeddings and head a drafter shares."""
        module, _ = _llama()
        params = module.llama_context_default_params()
        for name in ContextOptions.__dataclass_fields__:
            value = getattr(options, name)
            if value is not None:
                setattr(params, name, value)
        if other is not None:
            params.ctx_other = other._pointer
        pointer = module.llama_init_from_model(model._pointer, params)
        if not pointer:
            raise NativeError("llama.cpp cannot create a context; its log says why (verbose=True shows it).")
        context = cls(pointer, feature_width=feature_width)
        context._owned = True
        return context

    def close(self) -> None:
        """Free the context if this object made it; later calls raise NativeError."""
        if self._owned and self._pointer:
            _llama()[0].llama_free(self._pointer)
        self._pointer = None
        self._decode = self._seq_rm = self._get_logits = _closed
        self._views.clear()

    def set_causal(self, causal: bool) -> None:
        """Let a row see later rows of its batch (`causal=False`) or not."""
        _llama()[0].llama_set_causal_attn(self._pointer, causal)
        self._causal = causal

    def output_lattice(self) -> None:
        """Keep the selector's rows of every decode, whatever rows are outputs (see `lattice`)."""
        _function("llama_set_embeddings_nextn")(self._pointer, True, False)
        self._nextn = True

    def tap(self, layers: Sequence[int]) -> None:
        """Keep the inputs of these layers at every decode; raises NativeError for a layer the model lacks."""
        if self._pointer is None:
            _closed()
        for layer in (*self._taps, *layers):
            if not 0 <= layer <= self.n_layer:
                raise NativeError(f"layer {layer} cannot be tapped: the target has {self.n_layer} layers.")
        switch = _function("llama_set_embeddings_layer_inp")
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
        if tokens.min() < 0 or tokens.max() >= self.n_vocab:
            raise NativeError(f"token ids must lie in 0..{self.n_vocab - 1}, got {tokens.min()}..{tokens.max()}.")
        self._run(self._batch.of_tokens(tokens, start, outputs), n)
        self._outputs = {Outputs.NONE: 0, Outputs.LAST: 1, Outputs.ALL: n}[outputs]

    def decode_features(self, features: FloatArray, start: int) -> None:
        """Inject `features` [n, feature_width] at positions `start`...; raises NativeError."""
        n = len(features)
        self._check_rows(n)
        if features.shape[1] != self._batch.feature_width or not features.flags.c_contiguous:
            raise NativeError(f"features must be contiguous [n, {self._batch.feature_width}], got {features.shape}.")
        self._run(self._batch.of_features(features, start), n)
        self._outputs = self._rows = 0

    def _check_rows(self, n: int) -> None:
        limit = self.n_batch if self._causal else min(self.n_batch, self.n_ubatch)
        if not 0 < n <= limit:
            raise NativeError(f"a batch of {n} rows does not fit: this context takes 1 to {limit}; raise n_batch.")

    def _run(self, batch: Any, n: int) -> None:
        self._rows = self._outputs = self._tapped_rows = 0
        status = self._decode(self._pointer, batch)
        if status != 0:
            reason = {1: "its memory is full", 2: "it was aborted", -1: "the batch is invalid"}.get(status, "it failed")
            raise NativeError(f"llama.cpp could not evaluate {n} rows: {reason} (status {status}).")
        self._rows = n
        self._tapped_rows = n if self._taps else 0

    def logits(self) -> FloatArray:
        """View [rows marked as outputs, n_vocab] of the last decode, in batch order."""
        if self._outputs == 0:
            raise NativeError("the last batch computed no logits.")
        return self._view(ctypes.addressof(self._get_logits(self._pointer).contents), self._outputs, self.n_vocab)

    def lattice(self) -> FloatArray:
        """View [rows of the last token decode, n_embd]: what the selector wrote for each row."""
        if not self._nextn or self._rows == 0:
            raise NativeError("the last batch computed no selector rows.")
        return self._view(_function("llama_get_embeddings_nextn")(self._pointer), self._rows, self.n_embd)

    def layer_inputs(self, first: int, out: FloatArray) -> FloatArray:
        """Copy rows `first`... of the tapped layers of the last decode into `out` [n, taps * n_embd]; returns it."""
        n = len(out)
        if first < 0 or first + n > self._tapped_rows or out.shape[1] != len(self._taps) * self.n_embd:
            raise NativeError(
                f"rows {first}..{first + n} of the tapped layers were not computed: {self._tapped_rows} rows of "
                f"{len(self._taps)} layers are there."
            )
        read = _function("llama_get_embeddings_layer_inp")
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
        return bool(self._seq_rm(self._memory, _SEQUENCE, length, -1))

    def save(self) -> bytes:
        """Copy of everything in memory, for `restore`."""
        module, _ = _llama()
        size = module.llama_state_seq_get_size(self._pointer, _SEQUENCE)
        buffer = (ctypes.c_uint8 * size)()
        written = module.llama_state_seq_get_data(self._pointer, buffer, size, _SEQUENCE)
        return bytes(memoryview(buffer)[:written])

    def restore(self, state: bytes) -> None:
        """Replace memory by what `save` of an equal context returned; raises NativeError if it does not fit."""
        buffer = (ctypes.c_uint8 * len(state)).from_buffer_copy(state)
        if _llama()[0].llama_state_seq_set_data(self._pointer, buffer, len(state), _SEQUENCE) == 0:
            raise NativeError("the saved state does not fit this context; use the same drafter and n_ctx.")

    def clear(self) -> None:
        """Drop everything; works for every kind of memory."""
        _llama()[0].llama_memory_clear(self._memory, True)


def _closed(*_: object) -> Any:
    raise NativeError("this model is closed; make a new object.")


class _Batch:
    """Arrays of one context's batches, allocated once; llama.cpp copies them during the call."""

    def __init__(self, module: Any, capacity: int, feature_width: int) -> None:
        self.feature_width = feature_width
        self._tokens = np.zeros(capacity, np.int32)
        self._positions = np.zeros(capacity * _POSITIONS_PER_FEATURE, np.int32)
        self._steps = np.arange(capacity, dtype=np.int32)
        self._n_sequences = np.ones(capacity, np.int32)
        self._sequence = np.full(1, _SEQUENCE, np.int32)
        self._sequences = np.full(capacity + 1, self._sequence.ctypes.data, np.uintp)
        self._outputs = np.zeros(capacity, np.int8)
        self._of_tokens, self._of_features = module.llama_batch(), module.llama_batch()
        for batch in (self._of_tokens, self._of_features):
            batch.pos = _pointer(self._positions, ctypes.c_int32)
            batch.n_seq_id = _pointer(self._n_sequences, ctypes.c_int32)
            batch.seq_id = _pointer(self._sequences, ctypes.POINTER(ctypes.c_int32))
            batch.logits = _pointer(self._outputs, ctypes.c_int8)
        self._of_tokens.token = _pointer(self._tokens, ctypes.c_int32)

    def of_tokens(self, tokens: IntArray, start: int, outputs: Outputs) -> Any:
        n = len(tokens)
        self._tokens[:n] = tokens
        np.add(self._steps[:n], start, out=self._positions[:n])
        self._outputs[:n] = outputs is Outputs.ALL
        if outputs is Outputs.LAST:
            self._outputs[n - 1] = 1
        self._of_tokens.n_tokens = n
        return self._of_tokens

    def of_features(self, features: FloatArray, start: int) -> Any:
        n = len(features)
        sections = self._positions[: n * _POSITIONS_PER_FEATURE].reshape(_POSITIONS_PER_FEATURE, n)
        np.add(self._steps[:n], start, out=sections[0])
        sections[1:3] = sections[0]
        sections[3] = 0
        self._outputs[:n] = 0
        self._of_features.embd = _pointer(features, ctypes.c_float)
        self._of_features.n_tokens = n
        return self._of_features


def _pointer(array: npt.NDArray[Any], kind: Any) -> Any:
    return ctypes.cast(array.ctypes.data, ctypes.POINTER(kind))
