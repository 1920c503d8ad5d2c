"""llama.cpp's log, taken over for the time of one call."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any

from dflash2.native.loader import llama

# The log's receiver is one global of the library.
_LOCK = RLock()


@contextmanager
def captured_log(receive: Callable[[int, str], None]) -> Iterator[None]:
    """Give what llama.cpp logs to `receive(level, text)` instead of the receiver so far, which comes back after.

    One line may come in several pieces. An exception of `receive` cannot pass through llama.cpp: it is raised when
    the block ends, and until then `receive` is not called again.
    """
    module, _ = llama()
    raised: list[BaseException] = []

    def forward(level: int, text: bytes, _user_data: Any) -> None:
        if raised:
            return
        try:
            receive(level, text.decode("utf-8", "replace"))
        except BaseException as error:  # Ctrl-C too arrives here
            raised.append(error)

    callback = module.llama_log_callback(forward)
    with _LOCK:
        previous, user_data = module.llama_log_callback(), ctypes.c_void_p()
        module.llama_log_get(ctypes.byref(previous), ctypes.byref(user_data))
        module.llama_log_set(callback, None)
        try:
            yield
        finally:
            module.llama_log_set(previous, user_data)
    if raised:
        raise raised[0]
