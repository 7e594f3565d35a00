"""Loaders that make batches in the background, also those of the next epoch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator
from typing import Any, NamedTuple

from vitmnist.data.loaders.base import Batches, Loader
from vitmnist.data.sampler import EpochSampler

EPOCH_END = object()
"""Stands between the batches of two epochs of a run."""

Run = Generator[Any, None, None]
"""Batches of consecutive epochs, with `EPOCH_END` between two of them."""


class Ahead(NamedTuple):
    """A run that has arrived at the beginning of an epoch."""

    number: int
    run: Run


class BackgroundLoader(Loader):
    """A loader whose threads or processes begin the next epoch before it is asked for, if `epochs` is known.

    A run makes the batches of consecutive epochs, so its queue does not drain at the end of an epoch. Between epochs
    the run is kept: the next epoch continues it, and a call for any other one closes it.
    """

    def __init__(self, sampler: EpochSampler) -> None:
        super().__init__(sampler)
        self._ahead: Ahead | None = None

    @abstractmethod
    def run_epochs(self, numbers: range, start: int) -> Run:
        """A run of the epochs `numbers`, the first of them from batch `start` on.

        The generator must not refer to this loader, which refers to it: in a reference cycle, an abandoned loader
        would keep its threads and processes until the next garbage collection.
        """

    def epoch(self, number: int, start: int = 0) -> Batches:
        ahead = self._ahead
        if ahead and (number, start) != (ahead.number, 0):
            self._replace_ahead(None)
        return super().epoch(number, start)

    def batches(self, number: int, start: int) -> Batches:
        run = self._take_ahead(number, start)
        if run is None:
            run = self.run_epochs(range(number, max(number + 1, self.epochs or 0)), start)
        is_kept = False
        try:
            for batch in run:
                if batch is EPOCH_END:
                    is_kept = True
                    self._replace_ahead(Ahead(number + 1, run))
                    return
                yield batch
        finally:
            if not is_kept:
                run.close()

    def close(self) -> None:
        self._replace_ahead(None)
        super().close()

    def _take_ahead(self, number: int, start: int) -> Run | None:
        """The run that has arrived at this batch; None if there is none."""
        with self._lock:
            if self._ahead is None or (number, start) != (self._ahead.number, 0):
                return None
            run, self._ahead = self._ahead.run, None
        return run

    def _replace_ahead(self, ahead: Ahead | None) -> None:
        """Keep a run, or none, and close the one that was kept before."""
        with self._lock:
            before, self._ahead = self._ahead, ahead
            if ahead:
                self._live.add(ahead.run)  # closed with the loader
        if before:
            before.run.close()
