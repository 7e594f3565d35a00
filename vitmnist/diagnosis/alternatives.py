"""Other ways to load the batches of a `DataLoader`: its own with other workers, and this project's loaders."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch.utils.data import DataLoader, Subset

from vitmnist.data.decoding import find_random
from vitmnist.data.from_dataloader import KEEPS_SAMPLES, KeptDataLoader, PrefetchedDataLoader
from vitmnist.data.loaders.cache import CacheOptions
from vitmnist.data.loaders.timing import NOTICEABLE_WAIT
from vitmnist.diagnosis.result import Alternative, Figure
from vitmnist.diagnosis.stream import BatchStream
from vitmnist.errors import UserError, first_line
from vitmnist.runtime.cpu import available_cores
from vitmnist.runtime.memory import Memory, check_fits

SHARE_OF_TIME = 0.1  # of the time of the whole diagnosis, for decoding samples for one loader


Block = tuple[float, float]
"""Seconds per batch, and how many of them were spent waiting."""


class WatchedStep:
    """A training step that remembers the exception it raised, to tell it from an error of the loader."""

    def __init__(self, step: Callable[[Any], object]) -> None:
        self.error: Exception | None = None
        self._step = step

    def __call__(self, batch: Any) -> None:
        try:
            self._step(batch)
        except Exception as error:
            self.error = error
            raise


@dataclass
class Timed:
    """Something that is timed in blocks of batches.

    Args:
        time_block: times so many batches; None if there are none left.
        settle_s: seconds that queues take to fill again, which must not disturb what is timed next.
        cores: processor cores that were busy in each block.
    """

    time_block: Callable[[int], Block | None]
    settle_s: float = 0.0
    blocks: list[Block] = field(default_factory=list)
    cores: list[float] = field(default_factory=list)


@dataclass
class Candidate:
    """A way to load, built and ready to be timed; or the reason why it cannot be used."""

    name: str
    stream: BatchStream | None = None
    built_s: float = 0.0
    decoded: int | None = None
    memory_bytes: int | None = None
    identical: str = "yes"
    refused: str | None = None
    timed: Timed | None = None

    def time_block(self, size: int, device: torch.device, step: WatchedStep) -> Block | None:
        """Time a block of batches; an error of the loader refuses this candidate alone."""
        if self.stream is None or self.refused:
            return None
        try:
            return self.stream.time_block(size, device, step)
        except Exception as error:  # a worker may fail in any way
            if error is step.error:
                raise
            self.refused = _reason(error)
            self.stream.close()
            return None

    def row(self, dataloader: DataLoader[Any], loading_s: float) -> Alternative:
        """The row of the table.

        Args:
            loading_s: seconds that the DataLoader takes for a batch, to estimate the decoding of the whole set.
        """
        if self.refused or not self.stream or not self.timed or not self.timed.blocks:
            return Alternative(self.name, refused=self.refused or "it gave no batch")
        batch_s, waiting_s = (Figure.of(values) for values in zip(*self.timed.blocks, strict=True))
        set_up_s = self.stream.first_batch_s[0]
        if self.decoded is not None:
            missing = len(dataloader.dataset) - self.decoded  # type: ignore[arg-type]
            set_up_s = self.built_s + missing * loading_s / _batch_size(dataloader)
        epoch_s = median(self.stream.first_batch_s) + batch_s.median * (len(dataloader) - 1)
        return Alternative(self.name, batch_s, waiting_s, epoch_s, set_up_s, self.memory_bytes, self.identical)


def candidates(
    dataloader: DataLoader[Any],
    loading_s: float,
    waiting: float,
    seconds: float,
    device: torch.device,
    stack: ExitStack,
) -> list[Candidate]:
    """Everything that could deliver the batches of a DataLoader.

    Args:
        loading_s: seconds per batch of loading alone.
        waiting: the share of the time that the step waits; without any, other numbers of workers are not tried.
        seconds: for the whole diagnosis.
        stack: closes what is built.
    """
    found = []
    if waiting > NOTICEABLE_WAIT:
        identical = _are_identical(dataloader)
        for workers in _worker_counts(dataloader.num_workers):
            stream = BatchStream(with_workers(dataloader, workers))
            stack.callback(stream.close)
            found.append(Candidate(f"DataLoader, num_workers={workers}", stream, identical=identical))
    # A copy, because a DataLoader with persistent workers has a single iterator.
    copy = with_workers(dataloader, dataloader.num_workers)
    found.append(_built("prefetch", lambda: PrefetchedDataLoader(copy, device), stack))
    for name in KEEPS_SAMPLES if device.type == "cuda" else KEEPS_SAMPLES[1:]:
        found.append(_kept(name, dataloader, int(SHARE_OF_TIME * seconds / loading_s) + 2, device, stack))
    return found


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


def _are_identical(dataloader: DataLoader[Any]) -> str:
    """Whether other workers give the same batches: not if samples are random."""
    try:
        random = find_random(dataloader.dataset, dataloader.collate_fn)
    except Exception as error:  # the collate function may not take a batch of one
        return f"unknown: {_reason(error)}"
    return f"no, {random} is random" if random else "yes"


def _worker_counts(given: int) -> list[int]:
    """0, 2, 4, … up to the number of cores, without the number that is in use."""
    counts = [0, *(2**power for power in range(1, 7) if 2**power <= max(available_cores(), 2))]
    return [workers for workers in counts if workers != given]


def _kept(name: str, dataloader: DataLoader[Any], batches: int, device: torch.device, stack: ExitStack) -> Candidate:
    """A loader that decodes once, over as many samples as there is time for; its memory is that of the whole set."""
    size, batch_size = len(dataloader.dataset), _batch_size(dataloader)  # type: ignore[arg-type]
    decoded = min(size, batches * batch_size)
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
    candidate = _built(name, lambda: KeptDataLoader(part, name, device, CacheOptions.folder, None), stack)
    if candidate.stream:
        kept: KeptDataLoader = candidate.stream.source  # type: ignore[assignment]
        candidate.decoded, candidate.memory_bytes = decoded, kept.sample_nbytes * size
        in_memory = {"ram": Memory(host=candidate.memory_bytes), "gpu_slice": Memory(device=candidate.memory_bytes)}
        try:
            check_fits(name, in_memory.get(name, Memory()), device)
        except UserError as error:
            return Candidate(name, refused=str(error))
    return candidate


def _built(name: str, build: Callable[[], Any], stack: ExitStack) -> Candidate:
    started = time.perf_counter()
    try:
        loader = stack.enter_context(build())
    except Exception as error:  # a sample that the loop never reads may be broken
        return Candidate(name, refused=_reason(error).removeprefix(f"{name}: "))
    stream = BatchStream(loader)
    stack.callback(stream.close)
    return Candidate(name, stream, built_s=time.perf_counter() - started)


def _reason(error: Exception) -> str:
    return first_line(error) if isinstance(error, UserError) else f"{type(error).__name__}: {first_line(error)}"


def _batch_size(dataloader: DataLoader[Any]) -> int:
    """Samples per batch; of a batch sampler of its own kind, on average."""
    return dataloader.batch_size or max(len(dataloader.dataset) // max(len(dataloader), 1), 1)  # type: ignore[arg-type]
