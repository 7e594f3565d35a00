"""The articles' first pipeline: every sample is read and transformed by itself when it is asked for."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import data
from torchvision import transforms

from vitmnist.config.validation import bounded
from vitmnist.data.collate import collate_samples, map_tensors
from vitmnist.data.datasets.base import Split
from vitmnist.data.decoding import SharedSamples
from vitmnist.data.loaders.base import LOADERS, Batches, Data, Loader
from vitmnist.data.sampler import EpochSampler
from vitmnist.data.seeding import read_samples
from vitmnist.data.tensors import TensorSet
from vitmnist.errors import LoadingError, UserError
from vitmnist.runtime.device import accelerator_of


class ImagesOnDisk(data.Dataset[tuple[Tensor, int]]):
    """Sample i of a split: its picture on disk, as tensor, as normalised tensor; and its label."""

    def __init__(self, split: Split) -> None:
        assert split.pictures is not None
        self.pictures = split.pictures()
        self.labels = split.labels.tolist()
        self.transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize(split.mean, split.std)])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(self.pictures[index]), self.labels[index]


class BatchReader(data.Dataset[Any]):
    """Whole batches by the key (epoch, indices), as torch collates their samples.

    Args:
        seed: of samples that may be random, as those of any data set in Python may be; None for the project's own.
    """

    def __init__(self, samples: data.Dataset[Any], seed: int | None) -> None:
        self.samples, self.seed = samples, seed

    def __getitem__(self, key: tuple[int, list[int]]) -> Any:
        epoch, indices = key
        if self.seed is None:
            return collate_samples([self.samples[index] for index in indices])
        return collate_samples(read_samples(self.samples, indices, self.seed, epoch))


def reader_of(source: Data, seed: int) -> BatchReader:
    """Reads from disk where a split knows its pictures there, and from memory where a set is tensors."""
    if isinstance(source, Split) and source.pictures:
        return BatchReader(ImagesOnDisk(source), None)
    if isinstance(source, TensorSet):
        return BatchReader(data.TensorDataset(source.images, source.labels), None)
    # Workers are sent the user's own data set, without what another loader has decoded of it.
    return BatchReader(source.dataset if isinstance(source, SharedSamples) else source, seed)


class BatchKeys(data.Sampler[tuple[int, list[int]]]):
    """The keys of one epoch's batches; `number` and `start` are set before each pass.

    The epoch is part of the key because persistent workers keep the data set that they were started with.
    """

    def __init__(self, sampler: EpochSampler) -> None:
        self.sampler = sampler
        self.number = 0
        self.start = 0

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        for indices in self.sampler.batches(self.number, self.start):
            if isinstance(indices, slice):
                yield self.number, list(range(indices.start, indices.stop))
            else:
                yield self.number, indices.tolist()


log = logging.getLogger(__name__)

END = object()
GRACE_S = 3.0
LOOK_S = 5.0


@dataclass
class DiskOptions:
    """See `conf/data/loader/disk.yaml`."""

    num_workers: int = bounded(2, at_least=0)
    pin_memory: bool = True
    prefetch_factor: int = bounded(2, at_least=1)
    persistent_workers: bool = True
    timeout_s: float | None = bounded(300.0, above=0, at_most=1e6)


@LOADERS.register("disk", DiskOptions)
class DiskLoader(Loader):
    """A `torch.utils.data.DataLoader`; of a split on disk it delivers float32, normalised."""

    def __init__(self, options: DiskOptions, source: Data, sampler: EpochSampler, device: torch.device) -> None:
        super().__init__(sampler)
        self.options = options
        self.buffered = options.num_workers * options.prefetch_factor
        self.device = device
        self.accelerator = accelerator_of(device)
        self.reader = reader_of(source, sampler.seed)
        # A DataLoader with persistent workers has one iterator, which a second pass would reset. So each live
        # iterator has a DataLoader of its own, and one that has finished waits here with its workers for the next.
        self._idle: list[tuple[data.DataLoader[Any], BatchKeys]] = []

    def batches(self, number: int, start: int) -> Batches:
        workers = self.options.num_workers
        if not workers and self.reader.seed is not None and threading.current_thread() is not threading.main_thread():
            workers = 1
            log.info(
                "disk: 1 worker in place of num_workers=0: in a background thread, samples would share their random "
                "generators with the training loop"
            )
        with warnings.catch_warnings():
            # torch advises against more workers than cores, which is wrong for samples that wait for a disk.
            warnings.filterwarnings("ignore", "This DataLoader will create")
            try:
                dataloader, keys = self._idle.pop()
            except IndexError:
                dataloader, keys = self._build(workers)
            keys.number, keys.start = number, start
            samples = iter(dataloader)
        finished = False
        try:
            while (batch := self._next(samples)) is not END:
                yield map_tensors(self.accelerator.upload, batch)
            finished = True
        except UserError as error:
            # From a worker torch hands it on with the worker's traceback for a message.
            _, _, message = str(error).rpartition(f"{type(error).__name__}: ")
            raise type(error)(message.strip()) from error
        except (RuntimeError, ConnectionError, EOFError) as error:
            # What a data set raised itself, torch hands on from a worker as "Caught …".
            if workers and not str(error).startswith("Caught ") and (named := worker_error(error)):
                raise named from error
            raise
        finally:
            if finished and workers and not self._idle:
                self._idle.append((dataloader, keys))
            elif workers:
                _end_workers(samples)

    def _next(self, samples: Iterator[Any]) -> Any:
        """The next batch, or `END`.

        With a timeout torch looks after its workers only when it is over; asked again, it goes on waiting.
        """
        asked = time.monotonic()
        while True:
            try:
                return next(samples, END)
            except RuntimeError as error:
                waited, allowed = time.monotonic() - asked, self.options.timeout_s
                if not str(error).startswith("DataLoader timed out") or (allowed is not None and waited >= allowed):
                    raise

    def close(self) -> None:
        super().close()
        # Nothing else refers to an idle DataLoader, and its workers end with it.
        self._idle.clear()

    def _build(self, workers: int) -> tuple[data.DataLoader[Any], BatchKeys]:
        keys = BatchKeys(self.sampler)
        dataloader: data.DataLoader[Any] = data.DataLoader(
            self.reader,
            sampler=keys,
            batch_size=None,  # a key stands for a whole batch
            num_workers=workers,
            collate_fn=_unchanged,
            pin_memory=self.options.pin_memory and self.device.type == "cuda",
            prefetch_factor=self.options.prefetch_factor if workers else None,
            persistent_workers=self.options.persistent_workers and workers > 0,
            worker_init_fn=_outlive_signals,
            timeout=min(LOOK_S, self.options.timeout_s or LOOK_S) if workers else 0,
            # From which DataLoader draws a seed for its workers, in place of the global one.
            generator=torch.Generator(),
        )
        return dataloader, keys


def _unchanged(batch: Any) -> Any:
    return batch


def _end_workers(samples: Iterator[Any]) -> None:
    """What torch leaves to the garbage collector; but the traceback of an exception keeps the iterator."""
    try:
        samples._shutdown_workers()  # type: ignore[attr-defined]
    except RuntimeError as error:
        if not worker_error(error):  # of a worker that died, torch speaks amid everything; it has been told, or is late
            raise


def _outlive_signals(worker: int) -> None:
    """A terminal sends Ctrl-C to the workers too, and a batch system SIGTERM; the training process says when to stop.

    It is given `GRACE_S` to finish its batch; then a worker goes, for SIGTERM may have been meant for it alone. It goes
    with 0, for which torch does not raise in the middle of whatever the training process does.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: threading.Timer(GRACE_S, os._exit, [0]).start())


def worker_error(error: BaseException) -> LoadingError | None:
    """What torch says of a worker that died or hangs, as an error that names what to do; None for any other error."""
    message = str(error)
    if message.startswith("DataLoader timed out"):
        return LoadingError(
            f"disk: no batch came from a worker in time; look for what blocks it, or raise data.loader.timeout_s "
            f"(null waits for ever): {message}"
        )
    if message.startswith("DataLoader worker (pid") or isinstance(error, (ConnectionError, EOFError)):
        return LoadingError(
            f"disk: {message.strip().rstrip('.')}. A worker that was killed often met the limit of memory; "
            "try fewer with data.loader.num_workers=N"
        )
    return None
