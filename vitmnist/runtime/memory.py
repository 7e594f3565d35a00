"""How much memory a set takes, how much is free, and saying so before it runs out."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil
import torch

from vitmnist.errors import ConfigError
from vitmnist.runtime.allocator import _give_back

Result = TypeVar("Result")
CGROUP = Path("/sys/fs/cgroup")
PROCESS_GROUPS = Path("/proc/self/cgroup")
# By the controllers that a line of /proc/self/cgroup names: none in version 2. The limit, what is used, what of it is
# a cache of files.
GROUP_FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


class DoesNotFitError(ConfigError):
    """A loader whose set is larger than the memory it would be kept in."""


@dataclass(frozen=True)
class Memory:
    """Bytes of host and of device memory; on the CPU both are the host's."""

    host: int = 0
    device: int = 0

    def __add__(self, other: Memory) -> Memory:
        return Memory(self.host + other.host, self.device + other.device)

    def on(self, device: torch.device) -> Memory:
        """The same where host and device share their memory."""
        return self if device.type == "cuda" else Memory(self.host + self.device, 0)


def free_memory(device: torch.device) -> Memory:
    """What is free on the host, within the limits of its container, and on the device, torch's own stock included."""
    host = min([psutil.virtual_memory().available, *_container_free()])
    if device.type != "cuda":
        return Memory(host)
    stock = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return Memory(host, torch.cuda.mem_get_info(device)[0] + stock)


def _container_free() -> Iterator[int]:
    """What each control group of this process, of either version, has left; pages that can be dropped are not used."""
    for line in PROCESS_GROUPS.read_text().splitlines() if PROCESS_GROUPS.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        names = GROUP_FILES[controllers]
        # In a container the path is often the host's, and the files stand at the root.
        for place in (CGROUP / controllers / path.lstrip("/"), CGROUP / controllers):
            with suppress(OSError, ValueError, KeyError):  # no such file, or no limit ("max")
                limit, used = (int((place / name).read_text()) for name in names[:2])
                stat = dict(line.split() for line in (place / "memory.stat").read_text().splitlines())
                yield max(limit - used + int(stat[names[2]]), 0)


def reset_host_peak() -> bool:
    """Let the process's peak memory begin anew; False where the system cannot (it is Linux that can).

    What is not needed any more is given back first: glibc keeps what was freed, and a job of a sweep would be charged
    for the largest one before it.
    """
    gc.collect()
    _give_back()
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def host_memory(field: str) -> int:
    """Bytes of resident memory of this process on Linux: `VmRSS` now, `VmHWM` at its peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def peak_memory(work: Callable[[], Result], device: torch.device) -> tuple[Memory, Result]:
    """What `work` takes at its peak beside what was taken before, and its result; 0 where the system cannot tell."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = work()
        return Memory(device=torch.cuda.max_memory_allocated(device) - before), result
    if not reset_host_peak():
        return Memory(), work()
    resident = host_memory("VmRSS")
    result = work()
    return Memory(host=max(host_memory("VmHWM") - resident, 0)), result


def check_fits(
    loader: str, needs: Memory, device: torch.device, reserve: Memory = Memory(), others: tuple[str, ...] = ()
) -> None:
    """Refuse a set that does not fit.

    Args:
        needs: what the loader is about to allocate.
        reserve: what must be left free for the model.
        others: loaders that need less, for the message; `ram` is named only where it fits.

    Raises:
        DoesNotFitError: with both numbers, and the loaders that would work.
    """
    free, wanted, beside = free_memory(device), needs.on(device), reserve.on(device)
    for place, need, left, available in (
        (f"on {device}", wanted.device, beside.device, free.device),
        ("on the host", wanted.host, beside.host, free.host),
    ):
        if need and need + left > available:
            model = f", and the model needs {mib(left)} too" if left else ""
            fitting = [other for other in others if other != "ram" or needs.host + needs.device <= free.host]
            advice = f"; data/loader={' or data/loader='.join(fitting)} would work" if fitting else ""
            raise DoesNotFitError(
                f"{loader}: the set takes {mib(need)} of memory {place}, where {mib(available)} are free{model}{advice}"
            )


def mib(size: int) -> str:
    """A number of bytes for people."""
    return f"{size / 2**20:,.1f} MiB"
