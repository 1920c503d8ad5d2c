"""The machine that numbers were measured on, in words that may be published: no names of users or folders."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import psutil

from dflash2.native import Device, devices


@dataclass(frozen=True)
class Machine:
    """`processor` by its name, `cores` logical ones this process may use, `memory_bytes` in all (0: not known).

    `devices` are those of the llama.cpp library in use, the CPU left out.
    """

    processor: str
    cores: int
    memory_bytes: int
    system: str
    devices: tuple[Device, ...]


def this_machine() -> Machine:
    """The machine this process runs on; raises NativeError if there is no llama.cpp library."""
    return Machine(
        processor=_processor(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=_memory_bytes(),
        system=platform.platform(terse=True),
        devices=tuple(device for device in devices() if device.offloads),
    )


def peak_memory_bytes() -> int:
    """The most memory of this process that was resident at once, weights mapped from files included."""
    info = psutil.Process().memory_info()
    if hasattr(info, "peak_wset"):  # Windows
        return int(info.peak_wset)
    import resource

    unit = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        return 0
