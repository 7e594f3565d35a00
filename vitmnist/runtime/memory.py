"""Measures free and used memory, and refuses a dataset that does not fit before memory runs out."""

import ctypes
import gc
import mmap
import sys
from contextlib import suppress
from pathlib import Path
from typing import IO

import psutil
import torch

from vitmnist.errors import ConfigError
from vitmnist.runtime.cpu import local_world_size, read_container_limits

MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
"""The flag for a mapping without reserved swap. Python's `mmap` has it since 3.11."""
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""The numbers of two parameters of `mallopt`, from glibc's malloc.h."""


class OutOfSpaceError(ConfigError):
    """The samples to store need more memory or disk space than is free."""


def measure_free_memory(device: torch.device) -> int:
    """Return the bytes that this process can still allocate: on a CUDA device with torch's cache, else on the host.

    The memory of the machine and the limit of the container are divided among the ranks that torchrun has started here,
    because some ranks may not have allocated their share yet.
    """
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0] + cached)
    used, machine = psutil.Process().memory_info().rss, psutil.virtual_memory()
    limits = [machine.total, *map(int, read_container_limits("memory.max"))]
    return int(min([machine.available, *(max(limit // local_world_size() - used, 0) for limit in limits)]))


def keep_freed_memory() -> None:
    """Keep up to 2 GiB of freed memory in this process for the next batch or step on the CPU.

    By default glibc returns every block above 32 MiB to the system, which zeroes its pages before the next use:
    cropping images of 224 px into batches of 64 then takes twice as long.
    """
    _call_glibc("mallopt", M_MMAP_MAX, 0)
    _call_glibc("mallopt", M_TRIM_THRESHOLD, 2**31 - 1)


def _call_glibc(name: str, *arguments: int) -> None:
    """Call a function of glibc; do nothing with another C library."""
    with suppress(AttributeError, OSError, TypeError):
        getattr(ctypes.CDLL(None), name)(*arguments)


def map_private(file: IO[bytes]) -> mmap.mmap:
    """Map a file into memory. Writing into the mapping copies a page, and never changes the file."""
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    # With reserved swap, Linux refuses to map a file that is larger than memory.
    return mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE | MAP_NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE)


def reset_host_peak() -> None:
    """Reset the peak memory of this process; only Linux supports this.

    Freed memory that glibc keeps is first returned to the system, so that the peak of a job in a sweep does not include
    an earlier, larger job.
    """
    gc.collect()
    _call_glibc("malloc_trim", 0)
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def read_host_peak() -> int:
    """Return the peak resident memory of this process in bytes: since the reset on Linux, since its start elsewhere."""
    with suppress(OSError, IndexError):
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024
    try:
        import resource
    except ImportError:  # Windows has no such module.
        return int(psutil.Process().memory_info().peak_wset)
    # macOS counts bytes; other systems count KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def check_fits(subject: str, nbytes: int, device: torch.device, advice: str = "") -> None:
    """Raise `OutOfSpaceError` if a dataset does not fit into memory; `subject` begins the message, `advice` ends it."""
    if nbytes > (free := measure_free_memory(device)):
        location = f"on {device}" if device.type == "cuda" else "on the host"
        ranks = f" for each of {local_world_size()} processes" if local_world_size() > 1 else ""
        raise OutOfSpaceError(
            f"{subject}: the dataset takes {format_mib(nbytes)} of memory {location}, where {format_mib(free)} are free"
            f"{ranks}{advice}"
        )


def format_mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
