"""A background thread that makes the next batches while the model works on this one."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from queue import Empty, Full, Queue
from typing import Any

import torch
from threadpoolctl import threadpool_limits

from vitmnist.config import bounded
from vitmnist.data.dataset import Split
from vitmnist.data.loaders.contract import LOADERS, Batch, Batches, Loader
from vitmnist.data.order import EpochOrder
from vitmnist.errors import ConfigError


@dataclass
class PrefetchOptions:
    """See `conf/data/loader/prefetch.yaml`."""

    queue_size: int = bounded(2, at_least=1)
    base: dict[str, Any] = field(default_factory=lambda: {"name": "ram"})


@LOADERS.register("prefetch", PrefetchOptions)
class PrefetchLoader(Loader):
    """Wraps any other loader: the time of a step falls from loading + computing to the larger of the two.

    Each epoch has a thread and a queue of its own, so that no batch of an abandoned epoch can turn up in the next.
    With CUDA the base loader's copies go to one stream of this loader.
    """

    def __init__(self, options: PrefetchOptions, split: Split, order: EpochOrder, device: torch.device) -> None:
        if options.base.get("name") == "prefetch":
            raise ConfigError("data.loader.base.name=prefetch: prefetch cannot wrap itself; choose another base")
        self.base = LOADERS.build(options.base, split, order, device, key="data.loader.base")
        # After the base: at its end the interpreter closes the younger first, and this one's thread runs the base.
        super().__init__(order)
        self.queue_size = options.queue_size
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._producers: weakref.WeakSet[Producer] = weakref.WeakSet()

    def batches(self, number: int, start: int) -> Batches:
        producer = Producer(lambda: self.base.epoch(number, start), self.queue_size, self.stream)
        self._producers.add(producer)
        try:
            yield from producer.run()
        finally:
            producer.stop()

    def close(self) -> None:
        for producer in list(self._producers):
            producer.stop()
        super().close()
        self.base.close()


@dataclass(frozen=True)
class Ready:
    """A batch, and the event on the producer's stream after which its memory holds it; None on the CPU."""

    batch: Batch
    event: torch.cuda.Event | None


@dataclass(frozen=True)
class Failure:
    """An exception on its way to the consumer, with the producer's traceback."""

    error: BaseException


class Producer:
    """A thread that runs through an iterator into a bounded queue.

    Args:
        source: called in the thread; gives the iterator.
        size: finished batches that wait in the queue at most.
        stream: the CUDA stream that the thread's work is queued on, or None.
    """

    def __init__(self, source: Callable[[], Iterator[Batch]], size: int, stream: torch.cuda.Stream | None) -> None:
        self._source = source
        self._stream = stream
        self._queue: Queue[Ready | Failure | None] = Queue(size)  # None: the end
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._produce, name="vitmnist-prefetch", daemon=True)

    def run(self) -> Batches:
        """Start the thread and take its batches; what its source raises is raised where that batch would have come."""
        self._thread.start()
        while (item := self._queue.get()) is not None:
            if isinstance(item, Failure):
                raise item.error
            yield _received(item)

    def stop(self) -> None:
        """End the thread once the batch it is making is done; wait for that, a second at most."""
        self._stopped.set()
        # Python may collect an abandoned iterator in any thread, also in this one amid its own use of the queue.
        if threading.current_thread() is self._thread:
            return
        with suppress(Empty):
            while True:
                self._queue.get_nowait()
        if self._thread.is_alive():
            self._thread.join(timeout=1)
        with suppress(Full):
            self._queue.put_nowait(None)  # for a consumer that waits in another thread

    def _produce(self) -> None:
        try:
            with torch.cuda.stream(self._stream) if self._stream else one_core():
                for batch in self._source():
                    self._put(Ready(batch, self._stream.record_event() if self._stream else None))
                    if self._stopped.is_set():
                        return
            self._put(None)
        except BaseException as error:  # SystemExit too: whoever waits must hear of it
            self._put(Failure(error))

    def _put(self, item: Ready | Failure | None) -> None:
        while not self._stopped.is_set():
            with suppress(Full):
                self._queue.put(item, timeout=0.1)
                return


@contextmanager
def one_core() -> Iterator[None]:
    """Let torch use a single core in this thread.

    OpenMP gives each thread that computes a team of its own. A second team beside the model's, on the same two cores,
    made an epoch 7% longer (ratio to `ram` 1.072; with one core 1.001).
    """
    torch.get_num_threads()  # at its first question torch gives a new thread all cores; later that would undo the limit
    with threadpool_limits(1, user_api="openmp"):
        yield


def _received(item: Ready) -> Batch:
    if item.event is not None:
        consumer = torch.cuda.current_stream(item.batch[0].device)
        consumer.wait_event(item.event)
        for tensor in item.batch:
            # Allocated on the producer's stream: it must not be used again there while the consumer reads it.
            tensor.record_stream(consumer)
    return item.batch
