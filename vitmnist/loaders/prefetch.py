"""Prepares the next batches in a background thread while the model computes."""

from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from vitmnist.config.validation import config_field
from vitmnist.data.sampler import EpochSampler
from vitmnist.data.sources import SampleSource, TensorSet
from vitmnist.loaders.base import LOADERS, Batches, Loader
from vitmnist.runtime.background_map import BackgroundMap
from vitmnist.runtime.device import DeviceQueue, Event, create_queue
from vitmnist.store.tree import map_batch_tensors

END_OF_EPOCH = object()
"""The last result of the thread."""


@dataclass
class PrefetchOptions:
    """See `conf/data/loader/prefetch.yaml`. The base can be a name; by default `ram` for tensors, otherwise `disk`."""

    queue_size: int = config_field(2, at_least=1, at_most=1000)
    base: Any = None


@LOADERS.register("prefetch", PrefetchOptions)
class PrefetchLoader(Loader):
    """Wraps another loader. A step then takes max(loading, computing) instead of loading + computing.

    Each epoch has its own thread. With CUDA, the base loader copies on a stream of this loader.
    """

    takes_decoded = True

    def __init__(
        self, options: PrefetchOptions, source: SampleSource, sampler: EpochSampler, device: torch.device
    ) -> None:
        base = options.base or ("ram" if isinstance(source, TensorSet) else "disk")
        values = {"name": base} if isinstance(base, str) else base
        build, base_options = LOADERS.resolve(values, "data.loader.base", complete=True)
        self.base = build(base_options, source, sampler, device)
        # This comes after `base`: finalizers run in reverse order, so at exit the thread stops before the base loader.
        super().__init__(sampler)
        self.options = options
        self.num_workers, self.resolved_options = self.base.num_workers, self.base.resolved_options
        self.batches_ahead = options.queue_size + 1 + self.base.batches_ahead  # The thread holds one more batch.
        self.queue = create_queue(device)
        self.stream = self.queue.new_stream()

    def batches(self, epoch: int, start: int) -> Batches:
        # The thread must not refer to this loader: with a reference cycle, the thread of an abandoned loader would live
        # until the next garbage collection.
        make = partial(_make_batch, self.queue, self.base.epoch(epoch, start))
        events = iter(self.queue.record_event, END_OF_EPOCH)  # An endless iterator of events on the consumer's stream
        prepared: BackgroundMap[Event, tuple[Any, Event]] = BackgroundMap(
            make, events, threads=1, max_ahead=self.options.queue_size + 1, context=self.stream
        )
        with closing(prepared):
            for batch, event in prepared:
                if batch is END_OF_EPOCH:
                    return
                self.queue.wait_event(event)
                # The memory belongs to the thread's stream, which must not reuse it while this stream reads it.
                yield map_batch_tensors(self.queue.record_stream, batch)

    def close(self) -> None:
        super().close()
        self.base.close()


def _make_batch(queue: DeviceQueue, batches: Batches, event: Event) -> tuple[Any, Event]:
    """Return the next batch, and an event on the thread's stream after which other streams can read the batch.

    Wait for `event` first. The consumer recorded it when it requested the batch. Without the wait, a host that runs
    ahead would fill the memory of the device.
    """
    event.synchronize()
    return next(batches, END_OF_EPOCH), queue.record_event()
