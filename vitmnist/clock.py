"""Measuring where an epoch's time goes without stopping the device inside it."""

from __future__ import annotations

import time
from itertools import pairwise

import torch


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that was queued on it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class StepClock:
    """Splits a loop of steps into waiting for data and computing, in seconds.

    On the CPU the marks are readings of the host's clock. With CUDA the host runs ahead of the device, and its clock
    would charge the wrong account; there the marks are events on the device's own stream, read only at the end:
    waiting is the time between the end of one step and the start of the next, copies and gathers on that stream
    included.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[float | torch.cuda.Event] = []
        self._mark()

    def data_ready(self) -> None:
        """The batch is there; computing begins."""
        self._mark()

    def step_done(self) -> None:
        """The step is done, or queued; waiting begins."""
        self._mark()

    def read(self) -> tuple[float, float]:
        """Seconds waited and seconds computed up to the last `step_done`; waits for the device."""
        synchronize(self._device)
        spans = [_seconds(begin, end) for begin, end in pairwise(self._marks)]
        return sum(spans[0::2]), sum(spans[1::2])

    def _mark(self) -> None:
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())


def _seconds(begin: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    if isinstance(begin, torch.cuda.Event):
        return float(begin.elapsed_time(end)) / 1000  # type: ignore[arg-type]
    return end - begin  # type: ignore[operator]
