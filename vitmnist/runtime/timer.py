"""Where the time of an epoch goes: its phases, without synchronising the device inside it, and a profile of steps."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Literal, TypeVar, get_args

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from vitmnist.runtime.files import write_atomic

log = logging.getLogger(__name__)

Phase = Literal["waiting", "computing", "saving", "other"]
Mark = float | torch.cuda.Event
Item = TypeVar("Item")

SKIPPED, RECORDED, ROWS = 4, 5, 25
"""Steps of a profiled epoch that are skipped and recorded at most, and rows of the table of operations."""


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished everything queued on it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class EpochTimer:
    """Charges the seconds of a loop to phases, from `start` to `stop`, both on an idle device; starts in phase `other`.

    Each mark ends one phase and begins the next, so the phases add up to the wall clock. On the CPU a mark is a reading
    of the host's clock. With CUDA the host runs ahead of the device and its clock would charge the wrong phase, so
    marks are events on the device's stream, read only at the end.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[Phase, Mark]] = []

    def start(self) -> None:
        """Synchronise the device, and begin at zero."""
        self._marks.clear()
        self.stop()

    def begin(self, phase: Phase) -> None:
        """Charge the time from here on to `phase`."""
        mark: Mark = time.perf_counter()
        if self._device.type == "cuda":
            mark = torch.cuda.Event(enable_timing=True)
            mark.record(torch.cuda.current_stream(self._device))
        self._marks.append((phase, mark))

    def waiting(self, batches: Iterable[Item]) -> Iterator[Item]:
        """Yield the batches: `waiting` until each arrives, `computing` from then on."""
        self.begin("waiting")
        for batch in batches:
            self.begin("computing")
            yield batch
            self.begin("waiting")
        self._marks[-1] = "other", self._marks[-1][1]  # no batch follows: this is the end of the epoch

    def stop(self) -> None:
        """Synchronise the device, and end the last phase."""
        synchronize(self._device)
        self.begin("other")

    def seconds(self) -> dict[Phase, float]:
        """Seconds of each phase up to the last `begin` or `stop`; synchronises the device."""
        seconds: dict[Phase, float] = dict.fromkeys(get_args(Phase), 0.0)
        for phase, duration in self.spans():
            seconds[phase] += duration
        return seconds

    def first_wait(self) -> float:
        """Seconds from the first `waiting` to the mark after it; 0 if there is none. Synchronises the device."""
        return next((duration for phase, duration in self.spans() if phase == "waiting"), 0.0)

    def spans(self) -> Iterator[tuple[Phase, float]]:
        """The phases that have ended, in order, with their seconds; synchronises the device."""
        synchronize(self._device)
        for (phase, begin), (_, end) in pairwise(self._marks):
            if isinstance(begin, float):
                yield phase, end - begin  # type: ignore[operator]
            else:
                yield phase, float(begin.elapsed_time(end)) / 1000  # type: ignore[arg-type]


@contextmanager
def profiled(folder: Path, steps: int, device: torch.device) -> Iterator[Callable[[], None]]:
    """Profile some steps of an epoch into `profile/trace.json` and `profile/operations.txt`.

    Yields a function to call after each step. The first steps are skipped if there are enough. Profiled steps take
    longer.

    Args:
        folder: of the run.
        steps: number of steps in the epoch.
    """
    steps = max(steps, 1)  # 0 if the run was resumed from the end of an epoch
    recorded = min(RECORDED, steps)
    last = min(SKIPPED + RECORDED, steps) - 1

    def action(step: int) -> ProfilerAction:
        if step == last:
            return ProfilerAction.RECORD_AND_SAVE
        return ProfilerAction.RECORD if last - recorded < step < last else ProfilerAction.NONE

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities, schedule=action, profile_memory=True) as profiler:
        yield profiler.step
    output = folder / "profile"
    output.mkdir(exist_ok=True)
    profiler.export_chrome_trace(str(output / "trace.json"))
    table = profiler.key_averages().table(sort_by=f"self_{device.type}_time_total", row_limit=ROWS)
    write_atomic(output / "operations.txt", table.encode())
    log.info("%d steps were profiled, which makes them slower; see %s", recorded, os.path.relpath(output))
