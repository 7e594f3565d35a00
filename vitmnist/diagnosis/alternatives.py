"""Other ways to load the batches of a `DataLoader`: its own with other workers, and decoded once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader, Subset

from vitmnist.data.randomness import preserved_random_state, probe_indices
from vitmnist.errors import ConfigError
from vitmnist.loaders.batch_stream import BatchStream
from vitmnist.loaders.timing import Alternative, Bench, Timed, reason
from vitmnist.replacement.decoded_dataset import DecodedDataset
from vitmnist.replacement.from_dataloader import STORES, from_dataloader
from vitmnist.replacement.original import find_random, rebuilt, workers_needed
from vitmnist.runtime.memory import Memory, check_fits

TENSORS = 'ram, transforms="tensor"'
SHARE_OF_TIME = 0.1  # of the time of the whole diagnosis, for decoding samples for one loader
TO_PREPARE = 0.5  # share of the time of the whole diagnosis after which no other loader is prepared


class Part(Subset[Any]):
    """Some samples of a dataset, with its attributes, by which `from_dataloader` may refuse it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)


def samples_per_batch(dataloader: DataLoader[Any]) -> int:
    """The batch size; with a custom batch sampler the mean, if an epoch has each sample once.

    Raises:
        ConfigError: a batch sampler without a length.
    """
    if dataloader.batch_size:
        return dataloader.batch_size
    try:
        return max(len(dataloader.dataset) // max(len(dataloader), 1), 1)  # type: ignore[arg-type]
    except TypeError:
        raise ConfigError("its batch sampler has no length, so the size of its batches is not known") from None


def decode_part(
    dataloader: DataLoader[Any],
    indices: Sequence[int],
    store: str = "ram",
    device: torch.device | None = None,
    transforms: Literal["exact", "tensor"] = "exact",
) -> tuple[DataLoader[Any], int]:
    """What `from_dataloader` makes of a `DataLoader` for some of its samples, and the bytes that all would take.

    Raises:
        UserError: it would refuse the `DataLoader`, or all samples would not fit.
    """
    dataset: Any = dataloader.dataset
    if isinstance(dataset, DecodedDataset):
        raise ConfigError("the samples are decoded already")
    batch_size = samples_per_batch(dataloader)
    # With a generator of its own, `from_dataloader` keeps the workers.
    keeps_workers = workers_needed(dataloader) == dataloader.num_workers
    part = rebuilt(
        dataloader,
        dataset=Part(dataset, indices),
        batch_size=batch_size,
        sampler=None,
        shuffle=True,
        drop_last=len(indices) >= batch_size,
        generator=torch.Generator() if keeps_workers else None,
    )
    is_cuda = device is not None and device.type == "cuda"
    delivers = store == "gpu_slice" or (transforms == "tensor" and is_cuda)
    replaced = from_dataloader(part, store, device=device if delivers else None, transforms=transforms)
    size = int(replaced.dataset.sample_nbytes * len(dataset))  # type: ignore[attr-defined]
    needed = {"ram": Memory(host=size), "gpu_slice": Memory(device=size)}.get(store, Memory())
    check_fits(store, needed, device or torch.device("cpu"))
    return replaced, size


@dataclass
class Alternatives(Bench):
    """What else could deliver the batches of a DataLoader.

    Args:
        seconds: for the whole diagnosis.
    """

    dataloader: DataLoader[Any] = field(kw_only=True)
    step: Callable[[Any], object] = field(kw_only=True)
    device: torch.device = field(kw_only=True)
    seconds: float = field(kw_only=True)

    def __post_init__(self) -> None:
        self._prepared_until = time.perf_counter() + TO_PREPARE * self.seconds

    def add_workers(self, workers: int) -> Timed | None:
        """The same DataLoader with another number of workers; None if it failed."""
        name = f"DataLoader, num_workers={workers}"

        def build(row: Alternative, stack: ExitStack) -> Timed:
            self._check_time()
            return self._timed(rebuilt(self.dataloader, num_workers=workers))

        return self.add(name, build, self._repeats)

    def add_decoded(self, loading_s: float) -> None:
        """The loader with its samples decoded once: as many of them as there is time for.

        Args:
            loading_s: seconds per batch of loading alone.
        """
        if isinstance(self.dataloader.dataset, DecodedDataset):
            return
        size = len(self.dataloader.dataset)  # type: ignore[arg-type]

        def build(row: Alternative, stack: ExitStack) -> Timed:
            self._check_time()
            started, batch_size = time.perf_counter(), samples_per_batch(self.dataloader)
            indices = range(min(size, (int(SHARE_OF_TIME * self.seconds / loading_s) + 2) * batch_size))
            store, form = ("ram", "tensor") if row.name == TENSORS else (row.name, "exact")
            replaced, row.memory_bytes = decode_part(self.dataloader, indices, store, self.device, form)  # type: ignore[arg-type]
            row.set_up_s = time.perf_counter() - started + (size - len(indices)) * loading_s / batch_size
            return self._timed(replaced)

        for store in STORES if self.device.type == "cuda" else STORES[1:]:
            self.add(store, build, identical="yes")
        if self._repeats.startswith("no"):
            self.add(TENSORS, build, identical="same transforms, rounding")

    def _timed(self, loader: DataLoader[Any]) -> Timed:
        return Timed(BatchStream(loader, self.device), self.step)

    @cached_property
    def _repeats(self) -> str:
        """Whether batches are the same when they are read again, and if not why."""
        try:
            dataset, collate = self.dataloader.dataset, self.dataloader.collate_fn
            with preserved_random_state(dataset, collate):
                _, random = find_random(self.dataloader, probe_indices(len(dataset)))  # type: ignore[arg-type]
        except Exception as error:  # the collate function may not take a batch of one
            return f"unknown: {reason(error)}"
        return f"no, {random}" if random else "yes"

    def _check_time(self) -> None:
        if time.perf_counter() > self._prepared_until:
            raise ConfigError(f"not tried: there is no time for it in seconds={self.seconds:g}")


def complete_row(timed: Timed, batches: int | None) -> None:
    """Fill in what was measured of an alternative, for an epoch of so many batches; None: not known."""
    row, first_batch_s = timed.row, timed.stream.first_batch_s
    timed.complete_row()
    if row and row.batch_s:
        first_s = row.batch_s.median if timed.stream.times_epochs else median(first_batch_s)
        row.epoch_s = None if batches is None else first_s + row.batch_s.median * (batches - 1)
        row.set_up_s = first_batch_s[0] if row.set_up_s is None else row.set_up_s
