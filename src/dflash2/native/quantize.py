"""Quantisation of a whole GGUF file by llama.cpp's own `llama_model_quantize`, in this process.

What the call does, and what it asserts: `src/llama-quant.cpp` and `ggml/src/ggml-quants.c` of the pinned llama.cpp.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType

from dflash2.constants import LLAMA_CPP_PYTHON_VERSION
from dflash2.errors import GGUFError, NativeError
from dflash2.gguf_info import GGUFInfo, TensorInfo, read_gguf_info
from dflash2.native.loader import llama
from dflash2.native.log import captured_log

_Type = GGMLQuantizationType

# Types that llama.cpp's quantiser writes without an importance matrix; asking for another one ends the process.
WRITABLE_TYPES = frozenset({
    _Type.F32, _Type.F16, _Type.BF16, _Type.Q4_0, _Type.Q4_1, _Type.Q5_0, _Type.Q5_1, _Type.Q8_0,
    _Type.Q2_K, _Type.Q3_K, _Type.Q4_K, _Type.Q5_K, _Type.Q6_K, _Type.IQ3_S, _Type.IQ4_NL, _Type.IQ4_XS,
})  # fmt: skip
# Block scales are F16, and the search for an IQ3 grid point aborts once squares overflow.
LARGEST_VALUE = 65504.0

_MAX_LAYERS = 512  # LLAMA_MAX_LAYERS
_BUFFER_BYTES = 128 << 20  # rows in memory at once; llama.cpp's default is 8 GiB
_SLICE_BYTES = 32 << 20
_STREAM_ERROR = "iostream"  # in the text of every std::ios_base::failure
_LOG_ERROR = 4  # GGML_LOG_LEVEL_ERROR
_PROGRESS = re.compile(r"^\[ *(\d+)/ *(\d+)\]")
# Unsigned integers of the same bits, sign removed, sort as the magnitudes do: infinities and NaN last.
_MAGNITUDES = {"F32": (np.uint32, 0x7FFFFFFF), "F16": (np.uint16, 0x7FFF), "BF16": (np.uint16, 0x7FFF)}


def quantize_gguf(
    source: Path,
    output: Path,
    *,
    file_type: LlamaFileType,
    tensor_types: Sequence[tuple[str, GGMLQuantizationType]] = (),
    threads: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write `source` (a GGUF file with F32, F16 or BF16 matrices) to `output`, its matrices as `file_type` says.

    Args:
        source: whole, unsplit file of an architecture that llama.cpp knows.
        output: written in place and incomplete until this returns: give a temporary name, rename afterwards.
        file_type: a quantised mixture, which says per tensor what type it gets.
        tensor_types: (tensor name, type) pairs that the mixture does not decide.
        threads: 0 for all cores.
        progress: called with (tensors done, tensors in all).

    Raises NativeError for what llama.cpp would abort over or refuses, OSError if the output cannot be written,
    GGUFError for a source that is no GGUF file. What `progress` raises, and Ctrl-C, come out when llama.cpp is done.
    """
    info = read_gguf_info(source)
    _check(info, output, tensor_types)
    module, library = llama()
    params = _parameters(module)
    params.nthread = min(threads, os.cpu_count() or 1) if threads > 0 else 0
    params.ftype = int(file_type)
    params.max_buf_size = _BUFFER_BYTES
    overrides = _tensor_overrides(module, tensor_types)  # this name keeps it alive during the call
    params.tt_overrides = overrides
    log = _Log(progress)
    with captured_log(log.receive):
        status = module.llama_model_quantize(os.fsencode(source), os.fsencode(output), ctypes.byref(params))
    if status != 0:
        if _STREAM_ERROR in log.reason():
            raise OSError(errno.EIO, f"{log.reason()}; is the disk full?")
        raise NativeError(f"llama.cpp ({library.path.name}) cannot quantise {source}: {log.reason()}.")
    _settle(output)
    if progress:
        progress(len(info.tensors), len(info.tensors))


def _parameters(module: Any) -> Any:
    """The library's own defaults; raises NativeError unless they stand where llama_cpp's structure has them."""
    params = module.llama_model_quantize_default_params()
    expected = {"nthread": 0, "ftype": int(LlamaFileType.MOSTLY_Q8_0), "quantize_output_tensor": True, "pure": False}
    pointers = ("imatrix", "kv_overrides", "tt_overrides", "prune_layers")
    if (
        any(getattr(params, name, None) != value for name, value in expected.items())
        or any(getattr(params, name, True) for name in pointers)
        or getattr(params, "max_buf_size", 0) < _BUFFER_BYTES
    ):
        raise NativeError(
            "This llama.cpp takes other parameters for quantising than are known here; install llama-cpp-python"
            f" {LLAMA_CPP_PYTHON_VERSION}."
        )
    return params


def _check(info: GGUFInfo, output: Path, tensor_types: Sequence[tuple[str, GGMLQuantizationType]]) -> None:
    """Everything that llama.cpp would assert, abort or crash over."""
    if output.exists() and output.samefile(info.path):
        raise NativeError(f"{output} cannot be quantised onto itself; give another output.")
    layers = info.integer(info.own("block_count"))
    if layers is None or not 0 < layers <= _MAX_LAYERS:
        raise NativeError(f"{info.path} has {layers} layers; llama.cpp takes 1 to {_MAX_LAYERS}.")
    for name, ggml_type in tensor_types:
        tensor = info.tensor(name)
        if ggml_type not in WRITABLE_TYPES:
            raise NativeError(
                f"{info.path}: tensor {name!r} cannot be written as {ggml_type.name} without an importance matrix."
            )
        block = GGML_QUANT_SIZES[ggml_type][0]
        if tensor.shape[0] % block:
            raise NativeError(
                f"{info.path}: rows of tensor {name!r} hold {tensor.shape[0]} values, {ggml_type.name} needs a"
                f" multiple of {block}."
            )
    unrounded = {name for name, ggml_type in tensor_types if ggml_type in (_Type.F32, _Type.BF16)}
    for tensor in info.tensors:
        if len(tensor.shape) > 1 and tensor.name.endswith("weight") and tensor.name not in unrounded:
            _check_values(info.path, tensor)


def _check_values(path: Path, tensor: TensorInfo) -> None:
    if tensor.type_name not in _MAGNITUDES:
        raise NativeError(
            f"{path}: tensor {tensor.name!r} is {tensor.type_name}; quantise an F32, F16 or BF16 file instead."
        )
    dtype, mask = _MAGNITUDES[tensor.type_name]
    limit = int(np.float32(LARGEST_VALUE).view(np.uint32))
    if tensor.type_name == "BF16":
        limit >>= 16
    elif tensor.type_name == "F16":
        limit = int(np.float16(LARGEST_VALUE).view(np.uint16))
    with path.open("rb") as file:
        file.seek(tensor.offset)
        left = tensor.n_bytes
        while left:
            data = np.frombuffer(file.read(min(left, _SLICE_BYTES)), dtype)
            left -= data.nbytes
            if int((data & mask).max()) > limit:
                raise NativeError(
                    f"{path}: tensor {tensor.name!r} has values that no quantised type can hold (beyond"
                    f" +-{LARGEST_VALUE:.0f}, or not a number)."
                )


def _tensor_overrides(module: Any, tensor_types: Sequence[tuple[str, GGMLQuantizationType]]) -> Any:
    """Null-terminated; each name as a regular expression that matches it alone."""
    array = (module.llama_model_tensor_override * (len(tensor_types) + 1))()
    for item, (name, ggml_type) in zip(array, tensor_types, strict=False):
        item.pattern = f"^{re.escape(name)}$".encode()
        item.type = int(ggml_type)
    return array


def _settle(output: Path) -> None:
    """llama.cpp does not notice every full disk: bring the file to it, and see that it is whole."""
    with output.open("rb+") as file:
        os.fsync(file.fileno())
    try:
        read_gguf_info(output)
    except GGUFError as error:
        raise OSError(errno.EIO, "llama.cpp wrote it incompletely; is the disk full?") from error


class _Log:
    """Progress lines to numbers; the last error kept as the reason of a failure."""

    def __init__(self, progress: Callable[[int, int], None] | None) -> None:
        self._progress = progress
        self._error = ""

    def receive(self, level: int, text: str) -> None:
        if level == _LOG_ERROR and text.strip():
            self._error = text.strip()
        if self._progress and (match := _PROGRESS.match(text)):
            # The line comes when the work on its tensor begins.
            self._progress(int(match[1]) - 1, int(match[2]))

    def reason(self) -> str:
        return self._error.rpartition("failed to quantize: ")[2].rstrip(".") or "it does not say why"
