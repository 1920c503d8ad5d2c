"""The machine that numbers were measured on, in words that may be published: no names of users or folders."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from dflash2.native import Device, device_bytes_in_use, devices


@dataclass(frozen=True)
class Memory:
    """What a measurement took.

    Attributes:
        peak_resident_bytes: the most of this process that was resident at once, weights mapped from files included.
        device_bytes: by device, what came to be in use between two looks, by other programs too.
    """

    peak_resident_bytes: int
    device_bytes: Mapping[str, int]


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


def memory_taken(before: Mapping[str, int]) -> Memory:
    """Memory since the process began, and on devices since `device_bytes_in_use` said `before`."""
    now = device_bytes_in_use()
    return Memory(_peak_resident_bytes(), {name: in_use - before.get(name, 0) for name, in_use in now.items()})


def _peak_resident_bytes() -> int:
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
