"""The time of a user's script in its passes over loaders."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import astuple
from itertools import pairwise
from math import inf
from threading import get_ident, main_thread
from time import perf_counter, process_time
from typing import Any

from vitmnist.diagnosis.observation import Limits, Observation
from vitmnist.diagnosis.passes import Pass
from vitmnist.runtime.cpu import Cores, CpuTime

READ_EVERY_S = 0.1  # between readings of processor times within a pass, which take up to 0.3 ms
SHORT_S = 0.02  # processor times are not read as shorter passes begin and end
COVERED = 0.9  # by a pass: the part of the time between two readings from which they count


class Timeline:
    """The time of the script in its passes over loaders, after the warm-up: waiting for a loader, or work.

    Waiting is the time within `iter()` and `next()` of a `DataLoader`, and for the end of its workers. The rest of a
    pass is work. Overlapping passes, such as those of `zip` or of a validation within an epoch, are one.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.observations: list[Observation] = []
        self.steps = 0
        self.waiting_s = 0.0
        self.measuring_s = 0.0
        """Within passes, of looking at loaders and of readings of the processor times."""
        self.skipped = limits.warm_up
        """Steps of the warm-up."""
        self.started = perf_counter()
        self.first_pass: float | None = None
        self.ended: float | None = None
        self.is_stopped = False
        self._is_warm = False
        self._in_step: set[int] = set()  # the loaders that have delivered a batch of the current step
        self._waiting_threads: set[int] = set()
        self._waited_s = 0.0  # with the warm-up
        self._open: set[Pass] = set()
        self._held: list[float] = []  # begins of passes that end when the next one begins
        self._closed: list[list[float]] = []  # begins and ends
        self._readings = [CpuTime.now()]

    @property
    def is_open(self) -> bool:
        """Whether steps are observed now."""
        return self.first_pass is not None and self.ended is None

    @property
    def is_complete(self) -> bool:
        """Whether as many steps have been observed as asked for."""
        return self._is_warm and self.limits.steps is not None and self.steps >= self.limits.steps

    @property
    def is_threaded(self) -> bool:
        """Whether a loader is iterated in another thread, so that the script's own waiting is unknown."""
        return any(observation.in_other_thread for observation in self.observations)

    @property
    def is_waiting(self) -> bool:
        """Whether this thread is within a call of a loader; a loader that it iterates there is not charged."""
        return get_ident() in self._waiting_threads

    def begin(self, observation: Observation, looked: float) -> Pass:
        """Begin a pass, before its iterator is made; `looked` is when its loader was first looked at."""
        self._in_step.clear()  # the epoch before may have been left early, within a step
        self._add_measuring(observation, looked)
        self._begin_or_end(observation, None)
        began = perf_counter()
        self._end_held(began)
        for one in self._open:
            one.overtaken = one.overtaken or began
        new = Pass(observation, began, self._working(began))
        self._open.add(new)
        observation.epochs += 1
        observation.passes += self.is_open
        observation.is_iterated = True
        return new

    def call(self, one: Pass, call: Callable[..., Any], *arguments: Any, is_restart: bool) -> Any:
        """Call a function of an iterator, and add its duration to the waiting.

        Args:
            is_restart: whether the call begins or ends a pass.
        """
        observation, thread = one.observation, get_ident()
        self._waiting_threads.add(thread)
        # Read within the time that counts as waiting; not with workers: the loop would lose its core in the call.
        started, cpu_s = perf_counter(), 0.0 if observation.about["num_workers"] else process_time()
        try:
            return call(*arguments)
        except StopIteration:
            is_restart = True
            raise
        finally:
            cpu_s = 0.0 if observation.about["num_workers"] else process_time() - cpu_s
            one.last_request = perf_counter()
            self._waiting_threads.discard(thread)
            seconds = one.last_request - started
            one.waited_s += seconds
            observation.start_s += 0.0 if observation.batches_seen else seconds
            if self.is_open:
                is_main = thread == main_thread().ident
                self._waited_s += seconds if is_main else 0.0
                self.waiting_s += seconds if is_main else 0.0
                observation.waiting_s += seconds
                observation.waiting_cpu_s += cpu_s
                observation.restarts_s += seconds if is_restart else 0.0

    def request(self, one: Pass, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of an iterator that returns its next batch."""
        self._begin_or_end(one.observation, one)
        one.add_request(self._working(perf_counter()))
        try:
            batch = self.call(one, call, *arguments, is_restart=not one.batches)
        except StopIteration:
            self._in_step.clear()
            self.close(one, is_exhausted=True)
            raise
        one.add_batch(batch, self._working(one.last_request))
        self._add_batch(one.observation)
        return batch

    def drop(self, one: Pass, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of an iterator that ends its workers, as it is no longer used."""
        if not self.is_open or self.is_complete:
            return call(*arguments)
        began = perf_counter()
        self.close(one, dropped=began)
        if not one.observation.about["num_workers"]:
            return call(*arguments)
        result = self.call(one, call, *arguments, is_restart=True)
        self._add(began, one.last_request)
        return result

    def close(self, one: Pass, *, is_exhausted: bool = False, dropped: float | None = None) -> None:
        """End a pass, unless it has ended: its iterator is not used again."""
        if one.is_open:
            one.is_open = one.observation.is_iterated = False
            self._open.discard(one)
            now = perf_counter()
            if one.holds_batches(self._working(now)):
                self._held.append(one.began)
            else:
                self._add(one.began, one.end(is_exhausted=is_exhausted, dropped=dropped))
            self._read_cpu(one.observation, now, SHORT_S)

    def end(self) -> None:
        """Observe no more."""
        if self.is_open:
            now = perf_counter()
            if not self._is_warm:
                self._forget(now)
            self._readings.append(CpuTime.now())
            self.ended = now
            for one in list(self._open):
                self.close(one)
            self._end_held(now)

    def passes(self) -> list[list[float]]:
        """Begin and end of each pass in order, where overlapping ones are one."""
        merged: list[list[float]] = []
        for began, ended in sorted(self._closed):
            last = min(ended, self.ended or ended)
            if merged and began <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], last)
            elif last > began:
                merged.append([began, last])
        return merged

    def cores(self) -> Cores | None:
        """The cores in use during the passes; None if these were too short to read that."""
        passes = iter([*self.passes(), [inf, inf]])
        began, ended = next(passes)
        used = first = self._readings[0]
        for before, after in pairwise(self._readings):
            while ended <= before.wall_s:
                began, ended = next(passes)
            if min(ended, after.wall_s) - max(began, before.wall_s) > COVERED * (after.wall_s - before.wall_s):
                times = zip(astuple(used), astuple(before), astuple(after), strict=True)
                used = CpuTime(*(total + later - earlier for total, earlier, later in times))
        return used.cores_since(first) if used is not first else None

    def _begin_or_end(self, observation: Observation, one: Pass | None) -> None:
        """End the warm-up or the observation before a request if it is time; `one` is None if a pass begins."""
        now = perf_counter()
        self.first_pass = self.first_pass or now
        if self.ended:
            return
        self._read_cpu(observation, now, READ_EVERY_S if one else SHORT_S)
        if not self._is_warm and self.steps >= self.limits.warm_up:
            self._is_warm = True
            if one and one.holds_batches(self._working(now)):
                self.skipped = 0  # the steps of the warm-up are still to come
            elif self.steps:
                self._forget(now)
        elif self.is_complete and not (one and one.holds_batches(self._working(now))):
            self.end()
            if self.limits.stop and get_ident() == main_thread().ident:
                self.is_stopped = True
                sys.exit(0)

    def _working(self, now: float) -> float:
        """A clock that stands still while the script waits."""
        return now - self._waited_s

    def _add_batch(self, observation: Observation) -> None:
        """Count a batch that has arrived, and the step if it is the first batch of one."""
        observation.batches_seen += 1
        observation.batches += self.is_open
        observation.in_other_thread |= get_ident() != main_thread().ident
        if not self._in_step or id(observation) in self._in_step:
            self._in_step.clear()
            self.steps += self.is_open
        self._in_step.add(id(observation))

    def _end_held(self, now: float) -> None:
        for began in self._held:
            self._add(began, now)
        self._held.clear()

    def _add(self, began: float, ended: float) -> None:
        """Add a pass; there may be one for each step, so those that touch are joined at once."""
        if self._closed and self._closed[-1][0] <= began <= self._closed[-1][1]:
            self._closed[-1][1] = max(self._closed[-1][1], ended)
        else:
            self._closed.append([began, ended])

    def _read_cpu(self, observation: Observation, now: float, every_s: float) -> None:
        """Read the processor times, unless that was done lately; less often in a long script, as all are kept."""
        if now - self._readings[-1].wall_s > max(every_s, (now - self.started) / 1000):
            self._readings.append(CpuTime.now())
            self._add_measuring(observation, now)  # where others use the cores, a reading takes milliseconds

    def _add_measuring(self, observation: Observation, began: float) -> None:
        """Count the time since then as neither work nor waiting."""
        took = 0.0 if self.ended else perf_counter() - began
        observation.measuring_s += took
        if self._open or self._held:
            self.measuring_s += took
            self._waited_s += took

    def _forget(self, now: float) -> None:
        """Drop what was measured of the warm-up."""
        self.steps, self.waiting_s, self.measuring_s = 0, 0.0, 0.0
        self._closed.clear()
        self._held.clear()
        for one in self._open:
            one.began = now
        for observation in self.observations:
            observation.forget()
