"""A child process that does not outlive its parent, where the operating system sees to that."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def dies_with_parent() -> Callable[[], None] | None:
    """What a child is to call before its program starts (`preexec_fn`), so that it is killed when its parent is.

    On Linux the parent is the thread that started it: start it from one that lives as long as it should. None on other
    systems, where only a parent that ends in order can end it.
    """
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    parent = os.getpid()

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it has died meanwhile, and nobody is told of that any more
            os._exit(1)

    return ask
