"""Processor time of this process and of those that it has started."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import time
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from vitmnist.runtime import cpu
from vitmnist.runtime.cpu import CpuClock, has_bf16_units

COMPUTE = "import time\nwhile time.process_time() < 0.3: pass"


def compute(done: Event, finish: Event) -> None:
    while time.process_time() < 0.3:
        pass
    done.set()
    finish.wait()


def test_processes_that_live_and_that_have_ended_are_counted() -> None:
    context = multiprocessing.get_context("fork")
    done, finish = context.Event(), context.Event()
    living = context.Process(target=compute, args=(done, finish))
    clock, began = CpuClock(), time.perf_counter()
    subprocess.run([sys.executable, "-c", COMPUTE], check=True)
    living.start()
    assert done.wait(60)
    cores, seconds = clock.cores(), time.perf_counter() - began
    finish.set()
    living.join()
    assert cores.busy * seconds > 0.5
    assert cores.busy <= cores.available + 0.5
    assert str(cores) == f"{cores.busy:.1f} of {cores.available} cores busy"


@pytest.mark.parametrize(
    ("information", "expected"),
    [
        ("vendor_id : AuthenticAMD\nflags : sse avx512_bf16", True),
        ("vendor_id : GenuineIntel\nflags : sse avx512_bf16", False),
        ("vendor_id : GenuineIntel\nflags : avx512_bf16 amx_bf16", True),
        ("vendor_id : AuthenticAMD\nflags : sse", False),
        ("Features : asimd bf16", True),
    ],
)
def test_bf16_is_chosen_where_it_was_faster_or_has_its_own_units(
    information: str, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(information)
    monkeypatch.setattr(cpu, "CPUINFO", tmp_path / "cpuinfo")
    assert has_bf16_units() == expected
