"""A background thread makes the next batches while the model computes."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch import Tensor

from vitmnist.config.validation import bounded
from vitmnist.data.collate import map_tensors
from vitmnist.data.loaders.background import EPOCH_END, BackgroundLoader, Run
from vitmnist.data.loaders.base import LOADERS, Data, Loader, needs_of
from vitmnist.data.sampler import EpochSampler
from vitmnist.data.tensors import TensorSet
from vitmnist.errors import ConfigError, LoadingError
from vitmnist.runtime.backend import Backend, backend_of
from vitmnist.runtime.memory import Memory


@dataclass
class PrefetchOptions:
    """See `conf/data/loader/prefetch.yaml`. Without a base, tensors are taken from `ram` and samples from `disk`."""

    queue_size: int = bounded(2, at_least=1)
    timeout_s: float | None = bounded(300.0, above=0, at_most=1e6)
    base: dict[str, Any] = field(default_factory=dict)


@LOADERS.register("prefetch", PrefetchOptions)
class PrefetchLoader(BackgroundLoader):
    """Wraps any other loader: the time of a step falls from loading + computing to the larger of the two.

    Each run has its own thread and queue, so no batch of an abandoned epoch can appear in another one. With CUDA the
    copies of the base loader go to a stream of this loader.
    """

    def __init__(self, options: PrefetchOptions, data: Data, sampler: EpochSampler, device: torch.device) -> None:
        values = _base_values(options, data)
        if values.get("name") in ("prefetch", "auto"):
            raise ConfigError(
                f"data.loader.base.name={values['name']}: prefetch cannot wrap {values['name']}; "
                "choose another base, such as ram"
            )
        self.base = LOADERS.build(values, data, sampler, device, key="data.loader.base")
        # After the base: at exit the interpreter closes the younger one first, and its thread runs the base.
        super().__init__(sampler)
        self.options, self.num_workers = options, self.base.num_workers
        self.buffered = options.queue_size + 1 + self.base.buffered  # the thread holds one for which there is no room
        self.backend = backend_of(device)
        self.stream = self.backend.new_stream()
        self._producers: weakref.WeakSet[Producer] = weakref.WeakSet()

    @classmethod
    def needs(cls, options: PrefetchOptions, data: Data, sampler: EpochSampler, device: torch.device) -> Memory:
        """What the base needs; the queue holds a few batches."""
        return needs_of(_base_values(options, data), data, sampler, device)

    def run_epochs(self, numbers: range, start: int) -> Run:
        options, source = self.options, partial(_epochs_of, self.base, numbers, start)
        producer = Producer(source, options.queue_size, options.timeout_s, self.backend, self.stream)
        with self._lock:
            self._producers.add(producer)
        return producer.run()

    def close(self) -> None:
        with self._lock:
            producers = list(self._producers)
        for producer in producers:
            producer.stop()
        super().close()
        self.base.close()


def _epochs_of(base: Loader, numbers: range, start: int) -> Run:
    """A run of a loader. The loader itself is asked for one epoch after the other, and begins none of them ahead."""
    for number in numbers:
        if number != numbers.start:
            yield EPOCH_END
        yield from base.epoch(number, start)
        start = 0


def _base_values(options: PrefetchOptions, data: Data) -> dict[str, Any]:
    return options.base or LOADERS.complete({"name": "ram" if isinstance(data, TensorSet) else "disk"})


@dataclass(frozen=True)
class Item:
    """A batch with the event on the producer's stream after which it may be read, or the error that ended the epoch."""

    batch: Any = None
    event: Any = None
    error: BaseException | None = None


END = Item()


class Producer:
    """A thread that puts the batches of an iterator into a bounded queue.

    Python may collect an abandoned iterator in any thread, also in this one amid a queue operation. So both queues are
    `SimpleQueue`, whose `put` is reentrant: the batches, and the free places that bound their number.

    Args:
        source: called in the thread; returns the iterator.
        size: the most finished batches that wait in the queue.
        timeout_s: how long the consumer waits for a batch, in seconds; None is for ever.
        backend: of the device that the batches go to.
        stream: the stream for the thread's work.
    """

    def __init__(
        self, source: Callable[[], Iterator[Any]], size: int, timeout_s: float | None, backend: Backend, stream: Any
    ) -> None:
        self._source, self._timeout_s, self._backend, self._stream = source, timeout_s, backend, stream
        self._items: SimpleQueue[Item] = SimpleQueue()
        self._places: SimpleQueue[None] = SimpleQueue()
        for _ in range(size):
            self._places.put(None)
        self._is_stopped = False
        self._thread = threading.Thread(target=self._produce, name="vitmnist-prefetch", daemon=True)

    def run(self) -> Run:
        """Start the thread and yield its batches; raises an exception of the source in place of its batch.

        Raises:
            LoadingError: no batch came in time.
        """
        self._started_after = self._backend.record_event()
        try:
            self._thread.start()
            while (item := self._get()) is not END and not self._is_stopped:  # by `close` in another thread
                if item.error is not None:
                    raise item.error
                self._places.put(None)
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

    def _get(self) -> Item:
        try:
            return self._items.get(timeout=self._timeout_s)
        except Empty:
            raise LoadingError(
                f"prefetch: its base loader gave no batch within {self._timeout_s:g} s; look for what blocks it, or "
                "raise data.loader.timeout_s (null waits for ever)"
            ) from None

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
                    self._places.get()
                    if self._is_stopped:
                        return
                    self._items.put(item)
            self._items.put(END)
        except BaseException as error:  # SystemExit too: the consumer would wait for ever
            self._items.put(Item(error=error))
