"""A background thread makes the next batches while the model computes."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vitmnist.config.validation import bounded
from vitmnist.data.sampler import EpochSampler
from vitmnist.data.sources import SampleSource, map_tensors
from vitmnist.errors import ConfigError
from vitmnist.loaders.base import LOADERS, Batches, Loader, Place, WrapperOptions, needs_of
from vitmnist.runtime.device import Backend, Event, backend_of
from vitmnist.runtime.memory import Memory
from vitmnist.runtime.ordered_map import ordered_map

EPOCH_END = object()
"""Follows the batches of each epoch of a run."""

Run = ordered_map[Event, tuple[Any, Event]]
"""The batches of some epochs, each with its event."""


@dataclass
class PrefetchOptions(WrapperOptions):
    """See `conf/data/loader/prefetch.yaml`. Without a base, tensors are taken from `ram` and samples from `disk`."""

    queue_size: int = bounded(2, at_least=1, at_most=1000)
    base: dict[str, Any] = field(default_factory=dict)


@LOADERS.register("prefetch", PrefetchOptions)
class PrefetchLoader(Loader):
    """Wraps any other loader: the time of a step falls from loading + computing to the larger of the two.

    If `epochs` is known, a run makes the batches of all of them, so that its queue does not drain at the end of an
    epoch. Between epochs the run is kept: the next epoch continues it, and a call for any other one closes it.

    Each run has its own thread and queue, so no batch of an abandoned epoch can appear in another one. With CUDA the
    copies of the base loader go to a stream of this loader.
    """

    keeps = Place.NOWHERE  # itself

    def __init__(
        self, options: PrefetchOptions, data: SampleSource, sampler: EpochSampler, device: torch.device
    ) -> None:
        values = _base_values(options, data)
        build, base_options = LOADERS.member(values, key="data.loader.base")
        if isinstance(base_options, WrapperOptions):
            raise ConfigError(
                f"data.loader.base.name={values['name']}: prefetch cannot wrap {values['name']}; "
                "choose another base, such as ram"
            )
        self.base = build(base_options, data, sampler, device)
        # After the base: at exit the interpreter closes the younger one first, and its thread runs the base.
        super().__init__(sampler)
        self.options, self.num_workers, self.settings = options, self.base.num_workers, self.base.settings
        self.buffered = options.queue_size + 1 + self.base.buffered  # the thread holds one for which there is no room
        self.backend = backend_of(device)
        self.stream = self.backend.new_stream()
        self._ahead: tuple[int, Run] | None = None
        """The number of an epoch, and the run that has arrived at its beginning."""

    @classmethod
    def needs(cls, options: PrefetchOptions, data: SampleSource, sampler: EpochSampler, device: torch.device) -> Memory:
        """What the base needs; the queue holds a few batches."""
        return needs_of(_base_values(options, data), [(data, sampler)], device)

    def batches(self, number: int, start: int) -> Batches:
        run = self._take_ahead(number, start) or self._begin(range(number, max(number + 1, self.epochs or 0)), start)
        is_kept = False
        try:
            for batch, event in run:
                if batch is EPOCH_END:
                    is_kept = number + 1 < (self.epochs or 0)
                    if is_kept:
                        self._take_ahead(None)
                        with self._lock:
                            self._ahead = number + 1, run
                    return
                self.backend.wait_event(event)
                # The memory belongs to the thread's stream, which must not reuse it while another stream reads it.
                yield map_tensors(self._record_stream, batch)
        finally:
            if not is_kept:
                run.close()

    def close(self) -> None:
        self._take_ahead(None)
        super().close()
        self.base.close()

    def _begin(self, numbers: range, start: int) -> Run:
        """A run of the epochs `numbers`, the first of them from batch `start` on.

        It must not refer to this loader, which refers to it: in a reference cycle, an abandoned loader would keep its
        thread until the next garbage collection.
        """
        backend = self.backend
        make = partial(_make_batch, backend, _epochs_of(self.base, numbers, start))
        events = iter(backend.record_event, EPOCH_END)  # without end, on the stream of the consumer
        # The thread itself may hold a batch for which there is no room in the queue.
        run: Run = ordered_map(make, events, threads=1, ahead=self.options.queue_size + 1, context=self.stream)
        with self._lock:
            self._live.add(run)  # closed with the loader, from any thread
        return run

    def _take_ahead(self, number: int | None, start: int = 0) -> Run | None:
        """The run that was kept for this epoch; one for another epoch is closed."""
        with self._lock:
            ahead, self._ahead = self._ahead, None
        if ahead and (number, start) == (ahead[0], 0):
            return ahead[1]
        if ahead:
            ahead[1].close()
        return None

    def _record_stream(self, tensor: Tensor) -> Tensor:
        self.backend.record_stream(tensor)
        return tensor


def _make_batch(backend: Backend, epochs: Iterator[Any], event: Event) -> tuple[Any, Event]:
    """The next batch, with the event on the thread's stream after which it may be read.

    Args:
        event: on the consumer's stream, before it got the batch that makes room for this one. The thread waits for the
            device, because a host that runs ahead of it would fill its memory. So the device also has the set itself.
    """
    event.synchronize()
    return next(epochs, EPOCH_END), backend.record_event()


def _epochs_of(base: Loader, numbers: range, start: int) -> Generator[Any, None, None]:
    for number in numbers:
        yield from base.epoch(number, start)
        yield EPOCH_END
        start = 0


def _base_values(options: PrefetchOptions, data: SampleSource) -> dict[str, Any]:
    return options.base or LOADERS.complete({"name": "ram" if data.is_decoded else "disk"})
