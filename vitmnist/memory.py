"""How much memory a set takes, how much is free, and saying so before it runs out."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil
import torch

from vitmnist.errors import ConfigError

Result = TypeVar("Result")
CGROUP = Path("/sys/fs/cgroup")


class DoesNotFitError(ConfigError):
    """A loader whose set is larger than the memory it would be kept in."""


@dataclass(frozen=True)
class Memory:
    """Bytes of host and of device memory; on the CPU both are the host's."""

    host: int = 0
    device: int = 0

    def on(self, device: torch.device) -> Memory:
        """The same where host and device share their memory."""
        return self if device.type == "cuda" else Memory(self.host + self.device, 0)


def free_memory(device: torch.device) -> Memory:
    """What is free on the host, within the limits of its container, and on the device, torch's own stock included."""
    host = psutil.virtual_memory().available
    with suppress(OSError, ValueError):  # no such file, or no limit ("max")
        limit = int((CGROUP / "memory.max").read_text())
        used = int((CGROUP / "memory.current").read_text())
        host = min(host, max(limit - used, 0))
    if device.type != "cuda":
        return Memory(host)
    stock = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return Memory(host, torch.cuda.mem_get_info(device)[0] + stock)


def reset_host_peak() -> bool:
    """Let the process's peak memory begin anew; False where the system cannot (it is Linux that can)."""
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
            model = f", and the model needs {mib(left)} of them" if left else ""
            fitting = [other for other in others if other != "ram" or needs.host + needs.device <= free.host]
            advice = f"; {' or '.join(fitting)} would work" if fitting else ""
            raise DoesNotFitError(
                f"{loader}: the set takes {mib(need)} of memory {place}, where {mib(available)} are free{model}{advice}"
            )


def mib(size: int) -> str:
    """A number of bytes for people."""
    return f"{size / 2**20:,.1f} MiB"
