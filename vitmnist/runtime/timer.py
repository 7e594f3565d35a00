"""Measures the phases of an epoch without synchronising the device inside it."""

import time
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Literal, TypeVar, get_args

import torch

Phase = Literal["waiting", "computing", "saving", "other"]
Mark = float | torch.cuda.Event
Item = TypeVar("Item")


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class EpochTimer:
    """Divides the time of a loop into phases, from `start` to `stop`, when the device is idle.

    Each mark ends one phase and begins the next, so the phases add up to the wall-clock time. On the CPU a mark is a
    reading of the host's clock. With CUDA the host runs ahead of the device, and its clock would attribute time to the
    wrong phase, so marks are events on the device's stream, which are read at the end.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[Phase, Mark]] = []
        self.host_lead_s = 0.0
        """How long the last `stop` waited for the device: the host had queued the work for these seconds ahead."""

    def start(self) -> None:
        """Synchronise the device, discard earlier marks, and begin the phase `other`."""
        self._marks.clear()
        self.stop()

    def begin(self, phase: Phase) -> None:
        """End the current phase, and begin `phase`."""
        mark: Mark = time.perf_counter()
        if self._device.type == "cuda":
            mark = torch.cuda.Event(enable_timing=True)
            mark.record(torch.cuda.current_stream(self._device))
        self._marks.append((phase, mark))

    def waiting(self, batches: Iterable[Item]) -> Iterator[Item]:
        """Yield the batches. The phase is `waiting` until a batch arrives, then `computing` until the next request."""
        self.begin("waiting")
        for batch in batches:
            self.begin("computing")
            yield batch
            self.begin("waiting")
        self._marks[-1] = "other", self._marks[-1][1]  # The last request hit the end of the epoch.

    def stop(self) -> None:
        """Synchronise the device, and end the current phase."""
        queued_at = time.perf_counter()
        synchronize(self._device)
        self.host_lead_s = time.perf_counter() - queued_at
        self.begin("other")

    def seconds(self) -> dict[Phase, float]:
        """Return the seconds of each phase up to the last `begin` or `stop`; synchronises the device."""
        seconds: dict[Phase, float] = dict.fromkeys(get_args(Phase), 0.0)
        for phase, duration in self.spans():
            seconds[phase] += duration
        return seconds

    def spans(self) -> Iterator[tuple[Phase, float]]:
        """Yield the phases that have ended, in order, with their seconds; synchronises the device."""
        synchronize(self._device)
        for (phase, begin), (_, end) in pairwise(self._marks):
            if isinstance(begin, float):
                yield phase, end - begin  # type: ignore[operator]
            else:
                yield phase, float(begin.elapsed_time(end)) / 1000  # type: ignore[arg-type]
