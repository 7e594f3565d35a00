"""Other ways to load the batches of a `DataLoader`: its own with other workers, and this project's loaders."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property, partial
from statistics import median
from typing import Any

import torch
from torch.utils.data import DataLoader, Subset

from vitmnist.data.decoding import find_random
from vitmnist.data.from_dataloader import KEEPS_SAMPLES, KeptDataLoader, ReplacedDataLoader, from_dataloader
from vitmnist.data.loaders.batch_stream import BatchStream
from vitmnist.data.loaders.timing import Alternative, Bench, Timed, reason
from vitmnist.runtime.memory import Memory, check_fits

SHARE_OF_TIME = 0.1  # of the time of the whole diagnosis, for decoding samples for one loader


def with_workers(dataloader: DataLoader[Any], workers: int, **changed: Any) -> DataLoader[Any]:
    """The same DataLoader with another number of workers, and other arguments."""
    arguments = {
        "dataset": dataloader.dataset,
        "batch_sampler": dataloader.batch_sampler,
        "collate_fn": dataloader.collate_fn,
        "pin_memory": dataloader.pin_memory,
        "timeout": dataloader.timeout if workers else 0,
        "worker_init_fn": dataloader.worker_init_fn,
        "in_order": dataloader.in_order,
        "multiprocessing_context": dataloader.multiprocessing_context if workers else None,
        "generator": dataloader.generator,
        "prefetch_factor": (dataloader.prefetch_factor or 2) if workers else None,
        "persistent_workers": dataloader.persistent_workers and workers > 0,
    }
    return DataLoader(num_workers=workers, **{**arguments, **changed})


@dataclass
class Alternatives(Bench):
    """What else could deliver the batches of a DataLoader.

    Args:
        is_order_known: whether the batches are compared; nothing is known of the order of a loader of another kind.
    """

    dataloader: DataLoader[Any] = field(kw_only=True)
    step: Callable[[Any], object] = field(kw_only=True)
    device: torch.device = field(kw_only=True)
    is_order_known: bool = True

    def add_workers(self, workers: int) -> Timed | None:
        """The same DataLoader with another number of workers; None if it failed."""
        row = Alternative(f"DataLoader, num_workers={workers}", identical=self._repeats)
        return self.add(row, lambda stack: self._timed(with_workers(self.dataloader, workers)))

    def add_our_loaders(self, loading_s: float, seconds: float) -> None:
        """This project's loaders; those that decode once do so for as many samples as there is time for.

        Args:
            loading_s: seconds per batch of loading alone.
            seconds: for the whole diagnosis.
        """
        dataloader, size = self.dataloader, len(self.dataloader.dataset)  # type: ignore[arg-type]
        # With a batch sampler of its own kind, the mean.
        batch_size = dataloader.batch_size or max(size // max(len(dataloader), 1), 1)
        decoded = min(size, (int(SHARE_OF_TIME * seconds / loading_s) + 2) * batch_size)
        # Copies, because a DataLoader with persistent workers has a single iterator.
        whole = with_workers(dataloader, dataloader.num_workers)
        part = with_workers(
            dataloader,
            dataloader.num_workers,
            dataset=Subset(dataloader.dataset, range(decoded)),
            batch_sampler=None,
            batch_size=batch_size,
            shuffle=True,
            drop_last=decoded >= batch_size,
            generator=torch.Generator(),
        )

        def build(row: Alternative, stack: ExitStack) -> Timed:
            started = time.perf_counter()
            source = whole if row.name == "prefetch" else part
            loader = stack.enter_context(from_dataloader(source, row.name, device=self.device))
            if isinstance(loader, KeptDataLoader):
                row.set_up_s = time.perf_counter() - started + (size - decoded) * loading_s / batch_size
                row.memory_bytes = loader.sample_nbytes * size
                needed = {"ram": Memory(host=row.memory_bytes), "gpu_slice": Memory(device=row.memory_bytes)}
                check_fits(row.name, needed.get(row.name, Memory()), self.device)
            return self._timed(loader)

        for name in ("prefetch", *(KEEPS_SAMPLES if self.device.type == "cuda" else KEEPS_SAMPLES[1:])):
            row = Alternative(name, identical="yes")
            self.add(row, partial(build, row))

    def complete(self) -> list[Alternative]:
        """The rows, with what was measured; for as many batches per epoch as the DataLoader has."""
        for timed in self.turns:
            row, first_batch_s = timed.row, timed.stream.first_batch_s
            timed.complete_row()
            if row and row.batch_s:
                first_s = row.batch_s.median if timed.stream.times_epochs else median(first_batch_s)
                row.epoch_s = first_s + row.batch_s.median * (len(self.dataloader) - 1)
                row.set_up_s = first_batch_s[0] if row.set_up_s is None else row.set_up_s
                row.identical = row.identical if self.is_order_known else "not compared"
        return self.rows

    def _timed(self, loader: DataLoader[Any] | ReplacedDataLoader) -> Timed:
        return Timed(BatchStream(loader, self.device), self.step)

    @cached_property
    def _repeats(self) -> str:
        """Whether batches are the same when they are read again, and if not why."""
        try:
            random = find_random(self.dataloader.dataset, self.dataloader.collate_fn)
        except Exception as error:  # the collate function may not take a batch of one
            return f"unknown: {reason(error)}"
        return f"no, {random} is random" if random else "yes"
