"""A background thread makes the next batches while the model computes."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from vitmnist.config.validation import bounded
from vitmnist.data.collate import map_tensors
from vitmnist.data.sampler import EpochSampler
from vitmnist.data.tensors import SampleSource
from vitmnist.errors import ConfigError
from vitmnist.loaders.base import LOADERS, Batches, Loader, Place, WrapperOptions, needs_of
from vitmnist.runtime.device import Backend, backend_of
from vitmnist.runtime.memory import Memory

EPOCH_END = object()
"""Stands between the batches of two epochs of a run."""


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
        self._producers: weakref.WeakSet[Producer] = weakref.WeakSet()
        self._ahead: tuple[int, Batches] | None = None
        """The number of an epoch, and the run that has arrived at its beginning."""

    @classmethod
    def needs(
        cls, options: PrefetchOptions, data: SampleSource, sampler: EpochSampler, device: torch.device
    ) -> Memory | None:
        """What the base needs; the queue holds a few batches."""
        return needs_of(_base_values(options, data), [(data, sampler)], device)

    def batches(self, number: int, start: int) -> Batches:
        run = self._take_ahead(number, start) or self._begin(range(number, max(number + 1, self.epochs or 0)), start)
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
        with self._lock:
            producers = list(self._producers)
        for producer in producers:
            producer.stop()
        super().close()
        self.base.close()

    def _begin(self, numbers: range, start: int) -> Batches:
        """A run of the epochs `numbers`, the first of them from batch `start` on.

        It must not refer to this loader, which refers to it: in a reference cycle, an abandoned loader would keep its
        thread until the next garbage collection.
        """
        source = partial(_epochs_of, self.base, numbers, start)
        producer = Producer(source, self.options.queue_size, self.backend, self.stream)
        with self._lock:
            self._producers.add(producer)
        return producer.run()

    def _take_ahead(self, number: int | None, start: int = 0) -> Batches | None:
        """The run that was kept for this epoch; one for another epoch is closed."""
        with self._lock:
            ahead, self._ahead = self._ahead, None
        if ahead and (number, start) == (ahead[0], 0):
            return ahead[1]
        if ahead:
            ahead[1].close()
        return None


def _epochs_of(base: Loader, numbers: range, start: int) -> Generator[Any, None, None]:
    for number in numbers:
        if number != numbers.start:
            yield EPOCH_END
        yield from base.epoch(number, start)
        start = 0


def _base_values(options: PrefetchOptions, data: SampleSource) -> dict[str, Any]:
    return options.base or LOADERS.complete({"name": "ram" if data.is_decoded else "disk"})


@dataclass(frozen=True)
class Item:
    """A batch with the event on the producer's stream after which it may be read, or the error that ended the epoch."""

    batch: Any = None
    event: Any = None
    error: BaseException | None = None


END = Item()


class Producer:
    """A thread that puts the batches of an iterator into a bounded queue.

    Python may collect an abandoned iterator in any thread, also in this one in the middle of a queue operation. So
    both queues are `SimpleQueue`, whose `put` is reentrant: the batches, and the free places that bound their number.

    Args:
        source: called in the thread; returns the iterator.
        size: the most finished batches that wait in the queue.
        backend: of the device that the batches go to.
        stream: the stream for the thread's work.
    """

    def __init__(self, source: Callable[[], Iterator[Any]], size: int, backend: Backend, stream: Any) -> None:
        self._source, self._backend, self._stream = source, backend, stream
        self._items: SimpleQueue[Item] = SimpleQueue()
        self._places: SimpleQueue[Any] = SimpleQueue()  # each with the event on the consumer's stream that frees it
        for _ in range(size):
            self._places.put(None)
        self._is_stopped = False
        self._thread = threading.Thread(target=self._produce, name="vitmnist-prefetch", daemon=True)

    def run(self) -> Batches:
        """Start the thread and yield its batches; raises an exception of the source in place of its batch."""
        self._started_after = self._backend.record_event()
        try:
            self._thread.start()
            while (item := self._items.get()) is not END and not self._is_stopped:  # by `close` in another thread
                if item.error is not None:
                    raise item.error
                self._places.put(self._backend.record_event())  # the device has read the batch before
                self._backend.wait_event(item.event)
                # The memory belongs to the producer's stream, which must not reuse it while another stream reads it.
                yield map_tensors(self._record_stream, item.batch)
        finally:
            self.stop()

    def stop(self) -> None:
        """Stop the thread after its current batch, and wait up to a second for it.

        Python cannot interrupt a source that blocks for ever: its thread is a daemon and ends with the process.
        """
        self._is_stopped = True
        self._places.put(None)  # the thread may wait for one
        self._items.put(END)  # and a consumer in another thread for a batch
        if threading.current_thread() is not self._thread and self._thread.is_alive():
            self._thread.join(timeout=1)

    def _record_stream(self, tensor: Tensor) -> Tensor:
        self._backend.record_stream(tensor)
        return tensor

    def _produce(self) -> None:
        try:
            with self._backend.use_stream(self._stream):
                # The set itself may still be on its way to the device on the consumer's stream.
                self._backend.wait_event(self._started_after)
                for batch in self._source():
                    item = Item(batch, self._backend.record_event())
                    # Here the thread waits for the device: a host that runs ahead of it would fill its memory.
                    if (is_free := self._places.get()) is not None and not self._is_stopped:
                        self._backend.synchronize(is_free)
                    if self._is_stopped:
                        return
                    self._items.put(item)
            self._items.put(END)
        except BaseException as error:  # SystemExit too: the consumer would wait for ever
            self._items.put(Item(error=error))
