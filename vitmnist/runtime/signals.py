"""Turns signals, such as SIGINT and SIGTERM, and a time limit into a clean stop after the current step."""

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from enum import IntEnum
from types import FrameType
from typing import NoReturn

from vitmnist.errors import ExitCode, RunInterrupted, TimeLimitReached


class StopReason(IntEnum):
    """Why a run stops after its step; if ranks have several reasons, the highest value counts.

    SIGUSR1 serves batch systems, such as Slurm with `--signal=USR1@60`. SIGBREAK is Ctrl-Break on Windows.
    """

    NONE, TIME_LIMIT, SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGBREAK = range(7)


STOP_SIGNALS = {getattr(signal, reason.name): reason for reason in StopReason if hasattr(signal, reason.name)}
"""The signals of this system that stop a run."""


def exit_interrupted(hint: str = "") -> NoReturn:
    """Exit at once on a Ctrl-C when nothing can be lost.

    An exception would wait for threads, and the C++ code of a library that is being imported could swallow it.
    """
    os.write(2, os.fsencode(f"interrupted{hint}\n"))  # The signal can interrupt a print.
    os._exit(ExitCode.INTERRUPTED)


@contextmanager
def handle_signals(
    handler: Callable[[int, FrameType | None], object] | signal.Handlers, *signums: int
) -> Iterator[None]:
    """Handle signals with a function within the block; outside the main thread, do nothing."""
    with ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():
            for signum in signums:
                stack.callback(signal.signal, signum, signal.signal(signum, handler))
        yield


class StopSignal(AbstractContextManager["StopSignal"]):
    """Records that the run should stop after its step; a second Ctrl-C raises `KeyboardInterrupt` at once.

    A signal that arrives in the last step of a job is still recorded when the job ends, and ends the sweep.
    """

    def __init__(self) -> None:
        self._received = StopReason.NONE
        self._deadline = math.inf
        self._handlers = ExitStack()

    def listen(self, deadline: float) -> None:
        """Record signals, and the time limit when `time.monotonic` reaches `deadline`, until `__exit__`."""
        self._deadline = deadline
        self._handlers.enter_context(handle_signals(self._record, *list_handled_signals()))

    def __exit__(self, *exception: object) -> None:
        self._handlers.close()
        self._deadline = math.inf

    @property
    def reason(self) -> StopReason:
        if not self._received and time.monotonic() >= self._deadline:
            return StopReason.TIME_LIMIT
        return self._received

    def _record(self, signum: int, frame: FrameType | None) -> None:
        if self._received and signum == signal.SIGINT:
            raise KeyboardInterrupt
        self._received = self._received or STOP_SIGNALS[signum]


def raise_interruption(signum: int, frame: FrameType | None) -> NoReturn:
    """Handle a signal in a process that only waits for others."""
    raise create_interruption(STOP_SIGNALS[signum])


def list_handled_signals() -> list[int]:
    """List the stop signals that are not ignored; under nohup, for example, SIGHUP is ignored."""
    return [signum for signum in STOP_SIGNALS if signal.getsignal(signum) != signal.SIG_IGN]


def create_interruption(reason: StopReason) -> RunInterrupted:
    if reason is StopReason.TIME_LIMIT:
        return TimeLimitReached("the time limit max_minutes was reached")
    return RunInterrupted(f"{reason.name} was received")
