"""Weights of one GGUF file, loaded by llama.cpp."""

from __future__ import annotations

import ctypes
from pathlib import Path

from dflash2.errors import NativeError
from dflash2.native.devices import device_array
from dflash2.native.loader import llama, repacking_is_safe
from dflash2.native.options import Placement


class Model:
    """A loaded model that this object owns."""

    def __init__(self, path: Path, placement: Placement) -> None:
        """Load the GGUF at `path`; raises NativeError if llama.cpp refuses it."""
        module, _ = llama()
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
        if placement.devices is not None:
            self._devices = device_array(placement.devices)
            params.devices = ctypes.addressof(self._devices)
        self._pointer = module.llama_model_load_from_file(str(path).encode(), params)
        if not self._pointer:
            raise NativeError(f"llama.cpp cannot load {path}; its log says why (verbose=True shows it).")

    def close(self) -> None:
        """Free the model; contexts made from it must be closed first."""
        if self._pointer:
            llama()[0].llama_model_free(self._pointer)
            self._pointer = None
