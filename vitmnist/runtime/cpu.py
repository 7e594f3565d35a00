"""What the processor has: cores, and on Linux instruction sets and cache."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
KIB = 1024


def available_cores() -> int:
    """How many cores this process may use; where the system does not say, those of the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpuinfo(*keys: str) -> str | None:
    """The first value of one of these keys in /proc/cpuinfo; None without it."""
    with suppress(OSError):
        for line in CPUINFO.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() in keys:
                return value.strip()
    return None


def has_bf16_instructions() -> bool:
    """Whether the processor multiplies bfloat16 natively: AVX512-BF16, AMX, or ARM's BF16."""
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint((cpuinfo("flags", "Features") or "").split())


def last_level_cache() -> int | None:
    """Bytes of the largest cache of the first core; None if unknown."""
    with suppress(OSError, ValueError):
        sizes = [int(path.read_text().strip().removesuffix("K")) * KIB for path in CACHES.glob("index*/size")]
        return max(sizes, default=None)
    return None
