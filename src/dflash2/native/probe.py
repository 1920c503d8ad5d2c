"""What the library at hand can run, found out without loading a model."""

from __future__ import annotations

import ctypes
import os
import tempfile
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

from gguf import GGUFWriter

from dflash2.constants import DRAFTER_ARCHITECTURE
from dflash2.errors import NativeError
from dflash2.native.loader import Library, function, library, llama
from dflash2.native.log import captured_log
from dflash2.native.symbols import COUNTERS, SELECTOR_TOP_K, SYMBOLS


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


def support() -> Support:
    """What the library at hand can run; raises NativeError if there is none."""
    module, _ = llama()
    missing = tuple(name for name in SYMBOLS if not _exported(name))
    drafters = 0
    if knows_architecture(DRAFTER_ARCHITECTURE):
        drafters = 2 if any(hasattr(module._lib, name) for name in SELECTOR_TOP_K.names) else 1
    return Support(library(), version("llama-cpp-python"), missing, drafters)


def counters() -> dict[str, int]:
    """How often each piece of patched code ran in this process, of those that the library has."""
    module, _ = llama()
    found = {}
    for name in COUNTERS:
        counter = getattr(module._lib, name, None)
        if counter is not None:
            counter.restype = ctypes.c_uint64
            found[name] = int(counter())
    return found


def _exported(name: str) -> bool:
    try:
        function(name)
    except NativeError:
        return False
    return True


@cache
def knows_architecture(name: str) -> bool:
    """Whether the library loads models of this GGUF architecture; raises NativeError if there is no library.

    Asked by loading the vocabulary of a file that has none: it fails for an unknown architecture alone.
    """
    module, _ = llama()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "probe.gguf"
        writer = GGUFWriter(path, name)
        writer.add_tokenizer_model("no_vocab")
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        parameters = module.llama_model_default_params()
        parameters.vocab_only, parameters.n_gpu_layers = True, 0
        with captured_log(lambda _level, _text: None):
            model = module.llama_model_load_from_file(os.fsencode(path), parameters)
    if model:
        module.llama_model_free(model)
    return bool(model)
