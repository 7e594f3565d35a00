"""Loaders that make batches in the background, also those of the next epoch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator
from typing import Any

from vitmnist.data.loaders.base import Batches, Loader
from vitmnist.data.sampler import EpochSampler

EPOCH_END = object()
"""Stands between the batches of two epochs of a run."""

Run = Generator[Any, None, None]
"""Batches of consecutive epochs, with `EPOCH_END` between two of them."""


class BackgroundLoader(Loader):
    """A loader whose threads or processes begin the next epoch before it is asked for, if `epochs` is known.

    A run makes the batches of consecutive epochs, so its queue does not drain at the end of an epoch. Between epochs
    the run is kept: the next epoch continues it, and a call for any other one closes it.
    """

    def __init__(self, sampler: EpochSampler) -> None:
        super().__init__(sampler)
        self._ahead: tuple[int, Run] | None = None
        """The number of an epoch, and the run that has arrived at its beginning."""

    @abstractmethod
    def run_epochs(self, numbers: range, start: int) -> Run:
        """A run of the epochs `numbers`, the first of them from batch `start` on.

        The generator must not refer to this loader, which refers to it: in a reference cycle, an abandoned loader
        would keep its threads and processes until the next garbage collection.
        """

    def epoch(self, number: int, start: int = 0) -> Batches:
        ahead = self._ahead
        if ahead and (number, start) != (ahead[0], 0):
            self._take_ahead(None)
        return super().epoch(number, start)

    def batches(self, number: int, start: int) -> Batches:
        run = self._take_ahead(number, start)
        run = run or self.run_epochs(range(number, max(number + 1, self.epochs or 0)), start)
        is_kept = False
        try:
            for batch in run:
                if batch is EPOCH_END:
                    is_kept = True
                    self._take_ahead(None)
                    with self._lock:
                        self._ahead = number + 1, run
                        self._live.add(run)  # closed with the loader
                    return
                yield batch
        finally:
            if not is_kept:
                run.close()

    def close(self) -> None:
        self._take_ahead(None)
        super().close()

    def _take_ahead(self, number: int | None, start: int = 0) -> Run | None:
        """The run that was kept for this epoch; one for another epoch is closed."""
        with self._lock:
            ahead, self._ahead = self._ahead, None
        if ahead and (number, start) == (ahead[0], 0):
            return ahead[1]
        if ahead:
            ahead[1].close()
        return None
