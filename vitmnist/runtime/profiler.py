"""A few steps under torch's profiler: where their time goes, operation by operation."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from vitmnist.runtime.files import write_whole

log = logging.getLogger(__name__)

FOLDER = "profile"
TRACE, TABLE = "trace.json", "operations.txt"
WAITING, RECORDED, ROWS = 4, 5, 25


@contextmanager
def profiled(folder: Path, steps: int, device: torch.device) -> Iterator[Callable[[], None]]:
    """Record some steps of an epoch; yields what to call after each step, and leaves two files.

    `profile/trace.json` is for chrome://tracing or ui.perfetto.dev, `profile/operations.txt` lists the operations that
    took the most time on the device. The first steps are left out where there are enough. The steps that are recorded
    take longer than others.

    Args:
        folder: of the run.
        steps: of the epoch.
    """
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    warming = 1 if steps > 1 else 0
    recorded = max(min(RECORDED, steps - warming), 1)
    waiting = min(WAITING, max(steps - warming - recorded, 0))
    with profile(
        activities=activities,
        schedule=schedule(wait=waiting, warmup=warming, active=recorded, repeat=1),
        profile_memory=True,
    ) as recording:
        yield recording.step
    place = folder / FOLDER
    place.mkdir(exist_ok=True)
    recording.export_chrome_trace(str(place / TRACE))
    order = f"self_{device.type}_time_total"
    write_whole(place / TABLE, recording.key_averages().table(sort_by=order, row_limit=ROWS).encode())
    log.info("%d steps were profiled, and took longer for it; see %s", recorded, os.path.relpath(place))
