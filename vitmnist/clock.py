"""Measuring where an epoch's time goes without stopping the device inside it."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Literal

import torch

Account = Literal["waiting", "computing", "other"]


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that was queued on it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Clock:
    """Charges the seconds of a loop to accounts; begins with waiting.

    On the CPU the marks are readings of the host's clock. With CUDA the host runs ahead of the device, and its clock
    would charge the wrong account; there the marks are events on the device's own stream, read only at the end:
    waiting is the time between one step and the next on that stream, copies and gathers on it included.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._accounts: list[Account] = []
        self._marks: list[float | torch.cuda.Event] = []
        self.begin("waiting")

    def begin(self, account: Account) -> None:
        """From now on time goes to `account`."""
        self._accounts.append(account)
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def seconds(self, account: Account) -> float:
        """What `account` was charged up to the last `begin`; waits for the device."""
        synchronize(self._device)
        spans = zip(self._accounts, pairwise(self._marks), strict=False)  # the last account is still open
        return sum(_seconds(begin, end) for charged, (begin, end) in spans if charged == account)


def _seconds(begin: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    if isinstance(begin, torch.cuda.Event):
        return float(begin.elapsed_time(end)) / 1000  # type: ignore[arg-type]
    return end - begin  # type: ignore[operator]
