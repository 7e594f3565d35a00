"""Measures the phases of an epoch without synchronising the device inside it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Literal, TypeVar, get_args

import torch

Phase = Literal["waiting", "computing", "saving", "other"]
Mark = float | torch.cuda.Event
Item = TypeVar("Item")


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
        self._marks[-1] = "other", self._marks[-1][1]  # No batch has followed the last one.

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
