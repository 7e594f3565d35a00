"""Freed memory stays with the process where that is asked for."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_kept_memory_is_reused_without_page_faults() -> None:
    """A block above the 32 MiB from which glibc always asks the system, which counts the page faults.

    In a process of its own, because glibc serves a thread differently after an allocation that failed.
    """
    program = """if True:
        import resource, torch
        from vitmnist.runtime.allocator import freed_memory_kept

        def faults():
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            for _ in range(4):
                torch.ones(2**24)
            return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

        with freed_memory_kept():
            kept = min(faults() for _ in range(5))
        assert kept < faults() / 10, kept
    """
    subprocess.run([sys.executable, "-c", program], check=True)
