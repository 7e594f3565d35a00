"""A background thread that makes the next batches while the model works on this one."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, Full, Queue
from typing import Any

import torch
from torch import Tensor

from vitmnist.config.validation import bounded
from vitmnist.data.collate import map_tensors
from vitmnist.data.loaders.base import LOADERS, Batches, Data, Loader, needs_of
from vitmnist.data.sampler import EpochSampler
from vitmnist.data.tensors import TensorSet
from vitmnist.errors import ConfigError, LoadingError
from vitmnist.runtime.device import Accelerator, accelerator_of
from vitmnist.runtime.memory import Memory


@dataclass
class PrefetchOptions:
    """See `conf/data/loader/prefetch.yaml`. Without a base, tensors are taken from `ram` and samples from `disk`."""

    queue_size: int = bounded(2, at_least=1)
    timeout_s: float | None = bounded(300.0, above=0, at_most=1e6)
    base: dict[str, Any] = field(default_factory=dict)


@LOADERS.register("prefetch", PrefetchOptions)
class PrefetchLoader(Loader):
    """Wraps any other loader: the time of a step falls from loading + computing to the larger of the two.

    Each epoch has a thread and a queue of its own, so that no batch of an abandoned epoch can turn up in the next.
    With CUDA the base loader's copies go to one stream of this loader.
    """

    def __init__(self, options: PrefetchOptions, data: Data, sampler: EpochSampler, device: torch.device) -> None:
        values = base_of(options, data)
        if values.get("name") in ("prefetch", "auto"):
            raise ConfigError(
                f"data.loader.base.name={values['name']}: prefetch cannot wrap {values['name']}; "
                "choose another base, such as ram"
            )
        self.base = LOADERS.build(values, data, sampler, device, key="data.loader.base")
        # After the base: at its end the interpreter closes the younger first, and this one's thread runs the base.
        super().__init__(sampler)
        self.options = options
        self.buffered = options.queue_size + self.base.buffered
        self.accelerator = accelerator_of(device)
        self.stream = self.accelerator.stream()
        self._producers: weakref.WeakSet[Producer] = weakref.WeakSet()

    @classmethod
    def needs(cls, options: PrefetchOptions, data: Data, sampler: EpochSampler, device: torch.device) -> Memory:
        """What the base needs; the queue holds a few batches."""
        return needs_of(base_of(options, data), data, sampler, device)

    def batches(self, number: int, start: int) -> Batches:
        producer = Producer(
            lambda: self.base.epoch(number, start),
            self.options.queue_size,
            self.options.timeout_s,
            self.accelerator,
            self.stream,
        )
        with self._lock:
            self._producers.add(producer)
        try:
            yield from producer.run()
        finally:
            producer.stop()

    def close(self) -> None:
        with self._lock:
            producers = list(self._producers)
        for producer in producers:
            producer.stop()
        super().close()
        self.base.close()


def base_of(options: PrefetchOptions, data: Data) -> dict[str, Any]:
    """The options of the base loader, with its name."""
    return options.base or LOADERS.complete({"name": "ram" if isinstance(data, TensorSet) else "disk"})


@dataclass(frozen=True)
class Ready:
    """A batch, and the event on the producer's stream after which its memory holds it."""

    batch: Any
    event: Any


@dataclass(frozen=True)
class Failure:
    """An exception on its way to the consumer, with the producer's traceback."""

    error: BaseException


class Producer:
    """A thread that runs through an iterator into a bounded queue.

    Args:
        source: called in the thread; gives the iterator.
        size: finished batches that wait in the queue at most.
        timeout_s: how long the consumer waits for a batch, in seconds; None is for ever.
        accelerator: of the device that the batches go to.
        stream: one of its streams, which the thread's work is queued on.
    """

    def __init__(
        self,
        source: Callable[[], Iterator[Any]],
        size: int,
        timeout_s: float | None,
        accelerator: Accelerator,
        stream: Any,
    ) -> None:
        self._source = source
        self._timeout_s = timeout_s
        self._accelerator = accelerator
        self._stream = stream
        self._queue: Queue[Ready | Failure | None] = Queue(size)  # None: the end
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._produce, name="vitmnist-prefetch", daemon=True)

    def run(self) -> Batches:
        """Start the thread and take its batches; what its source raises is raised where that batch would have come.

        Raises:
            LoadingError: no batch came in time.
        """
        self._before = self._accelerator.event()
        self._thread.start()
        while (item := self._next()) is not None:
            if isinstance(item, Failure):
                raise item.error
            self._accelerator.wait(item.event)
            # Its memory belongs to the producer's stream: not to be used again there while the consumer reads it.
            yield map_tensors(self._held, item.batch)

    def stop(self) -> None:
        """End the thread once the batch it is making is done; wait for that, a second at most.

        Python cannot interrupt a source that blocks for ever: its thread is a daemon, and ends with the process.
        """
        self._stopped.set()
        # Python may collect an abandoned iterator in any thread, also in this one amid its own use of the queue.
        if threading.current_thread() is self._thread:
            return
        with suppress(Empty):
            while True:
                self._queue.get_nowait()
        if self._thread.is_alive():
            self._thread.join(timeout=1)

    def _next(self) -> Ready | Failure | None:
        asked = time.monotonic()
        while not self._stopped.is_set():  # by another thread
            with suppress(Empty):
                return self._queue.get(timeout=0.1)
            if self._timeout_s is not None and time.monotonic() - asked >= self._timeout_s:
                raise LoadingError(
                    f"prefetch: its base loader gave no batch within {self._timeout_s:g} s; look for what blocks it, "
                    "or raise data.loader.timeout_s (null waits for ever)"
                )
        return None

    def _held(self, tensor: Tensor) -> Tensor:
        self._accelerator.hold(tensor)
        return tensor

    def _produce(self) -> None:
        try:
            with self._accelerator.working_on(self._stream):
                # What the set itself is made of may still be under way on the consumer's stream.
                self._accelerator.wait(self._before)
                for batch in self._source():
                    self._put(Ready(batch, self._accelerator.event()))
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
