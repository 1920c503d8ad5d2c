"""What a context computes, operation by operation: llama.cpp's evaluation callback, results as arrays.

The layout of `ggml_tensor` is that of ggml.h at the pinned version; `Observer` refuses another one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash2.constants import GGML_VERSION
from dflash2.errors import NativeError
from dflash2.native.batch import FloatArray
from dflash2.native.devices import ggml
from dflash2.native.loader import llama

_MAX_DIMS, _MAX_OP_PARAMS, _MAX_SRC, _MAX_NAME = 4, 64, 10, 64
_F32, _F16, _BF16 = 0, 1, 30


class _Tensor(ctypes.Structure):
    """`struct ggml_tensor`."""


_Tensor._fields_ = [
    ("type", ctypes.c_int),
    ("buffer", ctypes.c_void_p),
    ("ne", ctypes.c_int64 * _MAX_DIMS),
    ("nb", ctypes.c_size_t * _MAX_DIMS),
    ("op", ctypes.c_int),
    ("op_params", ctypes.c_int32 * (_MAX_OP_PARAMS // 4)),
    ("flags", ctypes.c_int32),
    ("src", ctypes.POINTER(_Tensor) * _MAX_SRC),
    ("view_src", ctypes.POINTER(_Tensor)),
    ("view_offs", ctypes.c_size_t),
    ("data", ctypes.c_void_p),
    ("name", ctypes.c_char * _MAX_NAME),
    ("extra", ctypes.c_void_p),
    ("padding", ctypes.c_char * 8),
]


@dataclass(frozen=True)
class Operation:
    """One operation of a graph as it was computed.

    Attributes:
        name: of its result, such as `Qcur-3`: the part after the dash is the layer.
        operation: ggml's name, such as MUL_MAT.
        inputs: names of what it reads.
        types: ggml's names of the types of these.
        values: result [ne3, ne2, ne1, ne0] in single precision; None for a view, or for what is not floating-point.
    """

    name: str
    operation: str
    inputs: tuple[str, ...]
    types: tuple[str, ...]
    values: FloatArray | None


class Observer:
    """Gives every operation that a context computes to `receive`; each is then computed by itself, so slowly.

    An exception of `receive` cannot pass through llama.cpp: it is kept in `raised`, and nothing more is received.
    """

    def __init__(self, receive: Callable[[Operation], None]) -> None:
        """Raises NativeError if the library's tensors may have another layout than the pinned version's."""
        self.receive = receive
        self.raised: BaseException | None = None
        self._ggml = _functions()
        self._callback = llama()[0].ggml_backend_sched_eval_callback(self._evaluated)

    def attach(self, params: Any) -> None:
        """Put the callback into `params` of a context to be made."""
        params.cb_eval = self._callback
        params.cb_eval_user_data = None

    def _evaluated(self, tensor: Any, ask: bool, _user_data: Any) -> bool:
        if ask or self.raised is not None:
            return self.raised is None
        try:
            self.receive(self._read(ctypes.cast(tensor, ctypes.POINTER(_Tensor)).contents))
        except BaseException as error:  # Ctrl-C too arrives here
            self.raised = error
        return True

    def _read(self, tensor: _Tensor) -> Operation:
        given = [source.contents for source in tensor.src if source]
        return Operation(
            name=tensor.name.decode("utf-8", "replace"),
            operation=self._ggml.ggml_op_desc(ctypes.byref(tensor)).decode(),
            inputs=tuple(source.name.decode("utf-8", "replace") for source in given),
            types=tuple(self._ggml.ggml_type_name(source.type).decode() for source in given),
            values=None if tensor.view_src else self._values(tensor),
        )

    def _values(self, tensor: _Tensor) -> FloatArray | None:
        width = {_F32: 4, _F16: 2, _BF16: 2}.get(tensor.type)
        shape, strides = tuple(tensor.ne[::-1]), tuple(tensor.nb[::-1])
        if width is None or strides[-1] != width:
            return None
        span = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) + width
        raw = np.empty(span, np.uint8)
        self._ggml.ggml_backend_tensor_get(ctypes.byref(tensor), raw.ctypes.data, 0, span)
        if tensor.type == _BF16:
            bits = np.ndarray(shape, np.uint16, raw, strides=strides).astype(np.uint32) << 16
            return bits.view(np.float32)
        return np.ndarray(shape, np.float16 if width == 2 else np.float32, raw, strides=strides).astype(np.float32)


def _functions() -> Any:
    library = ggml()
    library.ggml_version.restype = ctypes.c_char_p
    found = library.ggml_version().decode()
    if not found.startswith(GGML_VERSION):
        raise NativeError(
            f"operations can be observed in ggml {GGML_VERSION} alone, and this library has {found}; use another build."
        )
    library.ggml_op_desc.restype = library.ggml_type_name.restype = ctypes.c_char_p
    library.ggml_op_desc.argtypes = [ctypes.POINTER(_Tensor)]
    library.ggml_type_name.argtypes = [ctypes.c_int]
    library.ggml_backend_tensor_get.argtypes = [ctypes.POINTER(_Tensor), ctypes.c_void_p, *[ctypes.c_size_t] * 2]
    library.ggml_backend_tensor_get.restype = None
    return library
