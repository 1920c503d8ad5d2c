"""Devices that llama.cpp can put weights on, by name."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dflash2.errors import NativeError
from dflash2.native.loader import llama

_OFFLOADED = (1, 2)  # GGML_BACKEND_DEVICE_TYPE_GPU and _IGPU


@dataclass(frozen=True)
class Device:
    """A device of the library: `name` as `device_draft` takes it, `description` in words, its memory in all.

    `offloads`: whether weights go to it, as to a GPU; the CPU and its accelerators do not.
    """

    name: str
    description: str
    memory_bytes: int
    offloads: bool


def devices() -> tuple[Device, ...]:
    """All devices of the library; those of an RPC server are asked over the network."""
    library = ggml()
    found = []
    for device in _handles(library):
        name, description = (
            read(device).decode("utf-8", "replace")
            for read in (library.ggml_backend_dev_name, library.ggml_backend_dev_description)
        )
        _free, total = _memory(library, device)
        found.append(Device(name, description, total, library.ggml_backend_dev_type(device) in _OFFLOADED))
    return tuple(found)


def device_bytes_in_use() -> dict[str, int]:
    """Memory taken on each device that offloads, by name, that of other programs included."""
    library = ggml()
    memory = {name: _memory(library, library.ggml_backend_dev_by_name(name.encode())) for name in gpu_names()}
    return {name: total - free for name, (free, total) in memory.items()}


def _memory(library: Any, device: Any) -> tuple[int, int]:
    """Bytes free and in all."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    library.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
    return free.value, total.value


def _handles(library: Any) -> list[Any]:
    return [library.ggml_backend_dev_get(index) for index in range(library.ggml_backend_dev_count())]


def device_names() -> tuple[str, ...]:
    """Names of all devices of the library, as `devices` takes them."""
    library = ggml()
    return tuple(library.ggml_backend_dev_name(device).decode() for device in _handles(library))


def gpu_names() -> tuple[str, ...]:
    """Names of the devices that llama.cpp offloads to: what is neither the CPU nor an accelerator of it."""
    library = ggml()
    return tuple(
        library.ggml_backend_dev_name(device).decode()
        for device in _handles(library)
        if library.ggml_backend_dev_type(device) in _OFFLOADED
    )


def device_array(names: Sequence[str]) -> Any:
    """NULL-terminated array of the devices called `names`; raises NativeError for one that is no such device."""
    library = ggml()
    found = [library.ggml_backend_dev_by_name(name.encode()) for name in names]
    for name, device in zip(names, found, strict=True):
        if not device:
            raise NativeError(f"llama.cpp has no device {name!r}; it has {', '.join(device_names())}.")
        if library.ggml_backend_dev_type(device) not in _OFFLOADED:
            raise NativeError(f"nothing is offloaded to {name!r}; name no device at all for the CPU.")
    return (ctypes.c_void_p * (len(found) + 1))(*found, None)


def ggml() -> Any:
    """The libggml that libllama uses; its signatures are in ggml-backend.h.

    Not `llama_cpp._ggml.libggml`: that is a second copy, from the stock folder, with a list of devices of its own.
    """
    module, loaded = llama()
    module.llama_backend_init()
    libggml = module._lib  # its symbols include those of the libraries it is linked with, except on Windows
    if not hasattr(libggml, "ggml_backend_dev_count"):
        from llama_cpp._ctypes_extensions import load_shared_library

        libggml = load_shared_library("ggml", loaded.path.parent)
    libggml.ggml_backend_dev_count.restype = ctypes.c_size_t
    libggml.ggml_backend_dev_get.argtypes = [ctypes.c_size_t]
    libggml.ggml_backend_dev_by_name.argtypes = [ctypes.c_char_p]
    size = ctypes.POINTER(ctypes.c_size_t)
    libggml.ggml_backend_dev_memory.argtypes = [ctypes.c_void_p, size, size]
    libggml.ggml_backend_dev_description.argtypes = [ctypes.c_void_p]
    libggml.ggml_backend_dev_description.restype = ctypes.c_char_p
    libggml.ggml_backend_dev_name.argtypes = [ctypes.c_void_p]
    libggml.ggml_backend_dev_type.argtypes = [ctypes.c_void_p]
    libggml.ggml_backend_dev_name.restype = ctypes.c_char_p
    for function in (libggml.ggml_backend_dev_get, libggml.ggml_backend_dev_by_name):
        function.restype = ctypes.c_void_p
    return libggml
