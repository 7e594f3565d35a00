"""Stopping a run so that nothing is lost: SIGTERM, Ctrl-C, and the time that it was given."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class RunInterrupted(BaseException):
    """The run was told to stop, and everything is saved.

    Not an `Exception`, as `KeyboardInterrupt` is none: what catches errors of a library must not swallow it.
    """

    def __init__(self, reason: str, exit_code: int) -> None:
        super().__init__(reason, exit_code)  # both, for it may come from another process
        self.reason, self.exit_code = reason, exit_code
        self.told = False
        """Whether the person knows what to do next."""

    def __str__(self) -> str:
        return self.reason


class StopSignal:
    """Whether to stop, and when that is possible.

    The first signal is noted, and acted upon by `check`, after a batch; where there is nothing to finish, at once. A
    second Ctrl-C ends at once wherever it comes.
    """

    def __init__(self) -> None:
        self._asked: RunInterrupted | None = None
        self._agreed: RunInterrupted | None = None
        self._deferring = 0
        self._deadline: float | None = None
        self._before: dict[int, Any] = {}

    @property
    def listening(self) -> bool:
        """Whether signals come here."""
        return bool(self._before)

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():  # only there may handlers be set
            self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, *raised: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def after_minutes(self, minutes: float | None) -> None:
        """A run begins: stop also when so many minutes have passed from now."""
        self._agreed = None  # of the run before
        self._deadline = None if minutes is None else time.monotonic() + 60 * minutes

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Within, a signal waits for `check`."""
        self._deferring += 1
        try:
            yield
        finally:
            self._deferring -= 1

    @property
    def due(self) -> RunInterrupted | None:
        """What the run is to stop for, if it is to."""
        if self._asked is None and self._deadline is not None and time.monotonic() >= self._deadline:
            return RunInterrupted("the time of max_minutes is over", 0)
        return self._asked or self._agreed

    def agree(self, exit_code: int) -> RunInterrupted:
        """Stop because a process of the same run is to; what to raise. A signal that comes now is nothing new."""
        name = signal.Signals(exit_code - 128).name if exit_code > 128 else "the end of max_minutes"
        self._agreed = self.due or RunInterrupted(f"{name} was received by another process of the run", exit_code)
        return self._agreed

    def check(self) -> None:
        """Raise `Stopped` if the run is to stop."""
        if stopped := self.due:
            raise stopped

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._asked is not None:
            if number == signal.SIGINT:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                raise KeyboardInterrupt
            return
        self._asked = RunInterrupted(f"{signal.Signals(number).name} was received", 128 + number)
        if not self._deferring and not self._agreed:
            raise self._asked
