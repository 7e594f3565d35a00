"""Profiles a few training steps with torch's profiler."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile, schedule

from vitmnist.runtime.files import write_atomic

log = logging.getLogger(__name__)

SKIPPED, RECORDED, ROWS = 4, 5, 25


@contextmanager
def profiled(folder: Path, steps: int, device: torch.device) -> Iterator[Callable[[], None]]:
    """Profile some steps of an epoch into `profile/trace.json` and `profile/operations.txt`.

    Yields a function to call after each step. The first steps are skipped if there are enough; one of them warms the
    profiler up. Profiled steps take longer.

    Args:
        folder: of the run.
        steps: number of steps in the epoch.
    """
    steps = max(steps, 1)  # 0 if the run was resumed from the end of an epoch
    warmup = min(1, steps - 1)
    recorded = min(RECORDED, steps - warmup)
    skipped = min(SKIPPED, steps - warmup - recorded)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    plan: Callable[[int], ProfilerAction] = (
        schedule(wait=skipped, warmup=warmup, active=recorded, repeat=1)
        if warmup
        else lambda step: ProfilerAction.NONE if step else ProfilerAction.RECORD_AND_SAVE  # schedule() would warn
    )
    with profile(activities=activities, schedule=plan, profile_memory=True) as profiler:
        yield profiler.step
    output = folder / "profile"
    output.mkdir(exist_ok=True)
    profiler.export_chrome_trace(str(output / "trace.json"))
    table = profiler.key_averages().table(sort_by=f"self_{device.type}_time_total", row_limit=ROWS)
    write_atomic(output / "operations.txt", table.encode())
    log.info("%d steps were profiled, which makes them slower; see %s", recorded, os.path.relpath(output))
