"""A pass over a loader: when it begins and ends."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from statistics import median_low
from typing import Any

from vitmnist.diagnosis.observation import Observation

HELD_S = 0.0002  # work per batch, below which the script may be collecting batches
OUR_S = 0.00002  # of it, which a request takes here
FIRST_STEPS = 32  # of a pass, by which the time of its last one is estimated


class Pass:
    """The use of one iterator of a `DataLoader`, from `iter()` until it is exhausted or dropped."""

    def __init__(self, observation: Observation, began: float, working: float) -> None:
        self.observation = observation
        self.began = self.last_request = began
        self.is_open = True
        self.batches = 0
        self.waited_s = 0.0
        self.overtaken: float | None = None  # when another pass began, after its last request
        self._work: list[float] = []  # of its first steps
        self._working, self._worked = working, working  # the clock without waiting: at its begin, at its last batch
        self._first: Callable[[], Any] = object  # whether its first batch still exists

    def add_batch(self, batch: Any, working: float) -> None:
        """Note a batch that has arrived."""
        self._worked, self.batches = working, self.batches + 1
        if self.batches == 1:
            self._first = _reference(batch)

    def add_request(self, working: float) -> None:
        """Note the work since the last batch, as the next one is asked for."""
        self.overtaken = None
        if 0 < self.batches <= FIRST_STEPS:
            self._work.append(working - self._worked)

    def holds_batches(self, working: float) -> bool:
        """Whether the script seems to collect the batches, and to work on them later.

        Neither sign is enough: a quick step works as little, and a script may keep its first batch alone.
        """
        work_s = working - self._working - OUR_S * (self.batches + 1)
        return (
            self.batches > 0 and work_s < min(HELD_S * self.batches, self.waited_s / 10) and self._first() is not None
        )

    def end(self, *, is_exhausted: bool, dropped: float | None) -> float:
        """When the work on its last batch ended, for a pass that holds none.

        A loop may ask for batches ahead, as Accelerate's does for one, and work on them after its last request.

        Args:
            dropped: when the iterator was; it may have been kept for long after the loop.
        """
        step_s = median_low(self._work) if self._work else 0.0  # the first may have compiled
        ahead = next((number for number, one in enumerate(self._work) if one >= step_s / 4), 0)
        if is_exhausted:
            return self.last_request + ahead * step_s
        if not self._work:
            return self.overtaken or dropped or self.last_request
        end = self.last_request + (ahead + 1) * step_s
        return dropped if dropped and dropped < max(end, self.last_request + max(self._work)) else end


def _reference(batch: Any) -> Callable[[], Any]:
    """A weak reference to a batch, or to the first part of it that can have one."""
    while True:
        try:
            return weakref.ref(batch)
        except TypeError:
            if not isinstance(batch, list | tuple | dict) or not batch:
                return object
            batch = next(iter(batch.values() if isinstance(batch, dict) else batch))
