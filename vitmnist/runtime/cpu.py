"""The processor: its cores, torch's threads on them, and on Linux its instruction sets.

This module imports torch only where threads are limited, so that `status` answers at once.
"""

import math
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import psutil
from threadpoolctl import ThreadpoolController

CPUINFO = Path("/proc/cpuinfo")
"""The file in which Linux describes the processor."""
CGROUP, PROCESS_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
"""The control groups of Linux, and the file with the group of this process."""


def read_container_limits(name: str) -> Iterator[str]:
    """Yield the limits `name` of the control groups (version 2) that contain this process, the innermost first."""
    groups = PROCESS_GROUPS.read_text(encoding="utf-8") if PROCESS_GROUPS.exists() else ""
    path = groups.partition("0::/")[2].partition("\n")[0]
    # In a container the path is often the path on the host, and the files are at the root.
    for folder in (CGROUP / path, *(CGROUP / path).parents):
        with suppress(OSError):
            limit = (folder / name).read_text(encoding="ascii")
            if not limit.startswith("max"):
                yield limit


def available_cores() -> int:
    """The number of cores that the system and the container let this process use."""
    quotas = [math.ceil(int(quota) / int(period)) for quota, period in map(str.split, read_container_limits("cpu.max"))]
    process = psutil.Process()
    # Processes on macOS have no affinity.
    cores = len(process.cpu_affinity()) if hasattr(process, "cpu_affinity") else os.cpu_count() or 1
    return min([cores, *quotas])


def local_world_size() -> int:
    """The number of ranks that torchrun has started on this machine; 1 without torchrun."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def cores_per_rank() -> int:
    """The number of cores that each rank on this machine may use, at least 1."""
    return max(1, available_cores() // local_world_size())


def read_cpuinfo(*keys: str) -> str | None:
    """Read the first value of one of these keys in `CPUINFO`; None if there is no such file or key."""
    with suppress(OSError):
        for line in CPUINFO.read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() in keys:
                return value.strip()
    return None


BF16_UNITS = "AMX, ARM's BF16 or an AMD's AVX512-BF16"
"""The instruction sets with which bfloat16 is expected to be faster than float32."""


def has_bf16_units() -> bool:
    """Whether the processor has one of `BF16_UNITS`.

    A training step of the articles' transformer (batch 500, two cores) took 226 µs per image in float32 and 178 in
    bfloat16 on an AMD EPYC with AVX512-BF16, but 230 and 340 on an Intel Xeon with AVX512-BF16 and without AMX. AMX and
    ARM are not measured. Only Linux lists the instruction sets.
    """
    flags = (read_cpuinfo("flags", "Features") or "").split()
    has_amd_bf16 = "avx512_bf16" in flags and read_cpuinfo("vendor_id") == "AuthenticAMD"
    return has_amd_bf16 or not {"amx_bf16", "bf16"}.isdisjoint(flags)


def limit_to_one_core() -> AbstractContextManager[Any]:
    """Limit torch to one core in this thread, from this call on or within a `with` block.

    OpenMP creates a team of threads for each computing thread. A second team on the two cores of the model made an
    epoch 7% longer (ratio of prefetched `ram` to `ram` 1.072; with one core 1.001).
    """
    import torch

    torch.get_num_threads()  # At its first use in a thread, torch would undo a limit.
    limits: AbstractContextManager[Any] = _get_openmp().limit(limits=1, user_api="openmp")
    return limits


@cache  # Finding the libraries takes a millisecond.
def _get_openmp() -> ThreadpoolController:
    return ThreadpoolController()


def create_decoder_context() -> Callable[[], AbstractContextManager[Any]]:
    """Create a context that limits each decoding thread to one core, and stops OpenMP's threads from spinning.

    After each operation of torch on several cores, the threads of GNU's OpenMP (libgomp) spin for 5 to 10 ms on cores
    that decoding needs: reading images of 64×64 in two threads next to a training step took 1.7 ms of processor time
    per image, and 1.2 ms without spinning. The threads of libgomp do not spin if there are more of them than cores.
    So the first thread that enters the context starts a second team, which lives as long as the thread:
    https://gcc.gnu.org/onlinedocs/libgomp/GOMP_005fSPINCOUNT.html
    """
    entered = count()

    def enter() -> AbstractContextManager[Any]:
        import torch

        if next(entered) == 0 and torch.get_num_threads() > 1:
            cores = os.cpu_count() or 1
            with _get_openmp().limit(limits=cores, user_api="openmp"):
                torch.zeros(cores * 2**16, device="cpu").add_(1)  # A tensor of this size uses a thread on each core.
        return limit_to_one_core()

    return enter
