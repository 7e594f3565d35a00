"""Other ways to load the batches of a `DataLoader`: its own with other workers, and this project's loaders."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch.utils.data import DataLoader, Subset

from vitmnist.data.decoding import find_random
from vitmnist.data.from_dataloader import KEEPS_SAMPLES, KeptDataLoader, ReplacedDataLoader, from_dataloader
from vitmnist.data.loaders.timing import NOTICEABLE_WAIT
from vitmnist.diagnosis.result import Alternative
from vitmnist.diagnosis.stream import reason
from vitmnist.runtime.cpu import available_cores
from vitmnist.runtime.memory import Memory, check_fits

SHARE_OF_TIME = 0.1  # of the time of the whole diagnosis, for decoding samples for one loader

Built = tuple[Alternative, DataLoader[Any] | ReplacedDataLoader | None]
"""A row of the table, and the loader to time; None if the row says why it is refused."""


def with_workers(dataloader: DataLoader[Any], workers: int) -> DataLoader[Any]:
    """The same DataLoader with another number of workers."""
    return DataLoader(
        dataloader.dataset,
        batch_sampler=dataloader.batch_sampler,
        num_workers=workers,
        collate_fn=dataloader.collate_fn,
        pin_memory=dataloader.pin_memory,
        timeout=dataloader.timeout if workers else 0,
        worker_init_fn=dataloader.worker_init_fn,
        in_order=dataloader.in_order,
        multiprocessing_context=dataloader.multiprocessing_context if workers else None,
        generator=dataloader.generator,
        prefetch_factor=(dataloader.prefetch_factor or 2) if workers else None,
        persistent_workers=dataloader.persistent_workers and workers > 0,
    )


def alternatives(
    dataloader: DataLoader[Any],
    loading_s: float,
    waiting: float,
    seconds: float,
    device: torch.device,
    stack: ExitStack,
) -> Iterator[Built]:
    """Everything that could deliver the batches of a DataLoader.

    Args:
        loading_s: seconds per batch of loading alone.
        waiting: the share of the time that the step waits; without any, other numbers of workers are not tried.
        seconds: for the whole diagnosis.
        stack: closes what is built.
    """
    if waiting > NOTICEABLE_WAIT:
        yield from _other_workers(dataloader)
    yield from _our_loaders(dataloader, loading_s, seconds, device, stack)


def _other_workers(dataloader: DataLoader[Any]) -> Iterator[Built]:
    """The same DataLoader with 0, 2, 4, … workers, up to the number of cores, without the number that is in use."""
    try:
        random = find_random(dataloader.dataset, dataloader.collate_fn)
        identical = f"no, {random} is random" if random else "yes"
    except Exception as error:  # the collate function may not take a batch of one
        identical = f"unknown: {reason(error)}"
    for workers in (0, *(2**power for power in range(1, 7) if 2**power <= max(available_cores(), 2))):
        if workers != dataloader.num_workers:
            row = Alternative(f"DataLoader, num_workers={workers}", identical=identical)
            yield row, with_workers(dataloader, workers)


def _our_loaders(
    dataloader: DataLoader[Any], loading_s: float, seconds: float, device: torch.device, stack: ExitStack
) -> Iterator[Built]:
    """This project's loaders; those that decode once do so for as many samples as there is time for."""
    size = len(dataloader.dataset)  # type: ignore[arg-type]
    # With a batch sampler of its own kind, the mean.
    batch_size = dataloader.batch_size or max(size // max(len(dataloader), 1), 1)
    decoded = min(size, (int(SHARE_OF_TIME * seconds / loading_s) + 2) * batch_size)
    part: DataLoader[Any] = DataLoader(
        Subset(dataloader.dataset, range(decoded)),
        batch_size,
        shuffle=True,
        drop_last=decoded >= batch_size,
        num_workers=dataloader.num_workers,
        collate_fn=dataloader.collate_fn,
        worker_init_fn=dataloader.worker_init_fn,
        multiprocessing_context=dataloader.multiprocessing_context,
        generator=torch.Generator(),
    )
    # A copy, because a DataLoader with persistent workers has a single iterator.
    sources = {"prefetch": with_workers(dataloader, dataloader.num_workers)}
    sources |= dict.fromkeys(KEEPS_SAMPLES if device.type == "cuda" else KEEPS_SAMPLES[1:], part)
    for name, source in sources.items():
        row, started = Alternative(name, identical="yes"), time.perf_counter()
        try:
            loader = stack.enter_context(from_dataloader(source, name, device=device))
            if isinstance(loader, KeptDataLoader):
                row.set_up_s = time.perf_counter() - started + (size - decoded) * loading_s / batch_size
                row.memory_bytes = loader.sample_nbytes * size
                needed = {"ram": Memory(host=row.memory_bytes), "gpu_slice": Memory(device=row.memory_bytes)}
                check_fits(name, needed.get(name, Memory()), device)
        except Exception as error:  # a sample that the loop never reads may be broken
            yield Alternative(name, refused=reason(error).removeprefix(f"{name}: ")), None
        else:
            yield row, loader
