"""Turns SIGINT, SIGTERM, SIGHUP, another signal and a time limit into a clean stop after the current step."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

UNFINISHED = 75
"""Exit code of a run that was asked to stop: EX_TEMPFAIL of BSD's sysexits.h, "try again later"."""

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""The signals that can stop a run. SIGUSR1 and SIGUSR2 do only if `stop_signal` names them."""


def ignore_stopping() -> None:
    """Ignore all signals that stop a run from now on."""
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)


class RunInterrupted(BaseException):
    """The run was asked to stop; once training has begun, it has saved a checkpoint.

    Like `KeyboardInterrupt` not an `Exception`, so that `except Exception` in a library does not swallow it.
    """

    def __init__(self, reason: str, exit_code: int) -> None:
        super().__init__(reason, exit_code)  # both, so that it can be pickled
        self.reason, self.exit_code = reason, exit_code

    def __str__(self) -> str:
        return self.reason


class TimeLimitReached(RunInterrupted):
    """The run has reached its `max_minutes`; the other jobs of a sweep are not concerned."""


class StopSignal:
    """Records that the run shall stop; `check` raises `RunInterrupted` where stopping is safe.

    The first signal is recorded and acted upon by `check` after a step; outside of `deferred` it raises at once. A
    second Ctrl-C raises `KeyboardInterrupt` at any point.
    """

    def __init__(self) -> None:
        self._received: RunInterrupted | None = None
        self._agreed: RunInterrupted | None = None
        self._deferring = 0
        self._deadline: float | None = None
        self._previous: dict[int, Any] = {}

    @property
    def is_listening(self) -> bool:
        """Whether the signal handlers are installed."""
        return bool(self._previous)

    def __enter__(self) -> StopSignal:
        self._received = self._agreed = self._deadline = None  # of a run before in this process
        if threading.current_thread() is threading.main_thread():  # Python allows handlers only there
            for number in (signal.SIGINT, signal.SIGTERM):
                self._listen(number)
            if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as under nohup
                self._listen(signal.SIGHUP)
        return self

    def __exit__(self, *raised: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def begin_run(self, minutes: float | None, name: str | None) -> None:
        """Set the time limit of a run from now on, and another signal that stops it.

        Args:
            name: such as SIGUSR1; heeded until the program ends.
        """
        self._agreed = None
        if name and self._previous:
            self._listen(signal.Signals[name])
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
        """Why the run shall stop; None to continue."""
        if self._received is None and self._deadline is not None and time.monotonic() >= self._deadline:
            return TimeLimitReached("the time limit max_minutes was reached", UNFINISHED)
        return self._agreed or self._received

    def agree(self, exit_code: int) -> RunInterrupted:
        """Stop now that the run is saved; returns what to raise. Later signals are ignored.

        Args:
            exit_code: that of the rank which was asked to stop.
        """
        if due := self.due:
            self._agreed = type(due)(due.reason, UNFINISHED)
        elif exit_code == UNFINISHED:
            self._agreed = TimeLimitReached("another process of the run has reached max_minutes", UNFINISHED)
        else:
            name = signal.Signals(exit_code - 128).name
            self._agreed = RunInterrupted(f"{name} was received by another process of the run", UNFINISHED)
        return self._agreed

    def check(self) -> None:
        """Raise `RunInterrupted` if the run shall stop."""
        if interrupted := self.due:
            raise interrupted

    def _listen(self, number: signal.Signals) -> None:
        if number not in self._previous:
            self._previous[number] = signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._received is not None:
            if number == signal.SIGINT:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                raise KeyboardInterrupt
            return
        self._received = RunInterrupted(f"{signal.Signals(number).name} was received", 128 + number)
        if not self._deferring and not self._agreed:
            raise self._received
