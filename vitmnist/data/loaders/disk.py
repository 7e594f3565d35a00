"""The articles' first pipeline: every sample is read and transformed on its own when it is needed."""

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

from vitmnist.config.validation import bounded
from vitmnist.data.collate import collate_samples, map_tensors
from vitmnist.data.datasets.base import Split
from vitmnist.data.loaders.base import LOADERS, Batches, Data, Loader
from vitmnist.data.sampler import EpochSampler
from vitmnist.data.seeding import read_samples
from vitmnist.data.tensors import TensorSet
from vitmnist.errors import LoadingError, UserError
from vitmnist.runtime.device import accelerator_of
from vitmnist.runtime.failures import worker_error
from vitmnist.runtime.imports import import_large
from vitmnist.runtime.signals import STOPPING

log = logging.getLogger(__name__)

END = object()
GRACE_S = 3.0  # how long a worker survives SIGTERM
POLL_S = 5.0  # how often torch looks for dead workers


class ImagesOnDisk(data.Dataset[tuple[Tensor, int]]):
    """Sample i of a split: its image on disk as a normalised tensor, and its label."""

    def __init__(self, split: Split) -> None:
        assert split.open_reader is not None
        transforms = import_large("torchvision.transforms")  # only this loader needs it
        self.reader = split.open_reader()
        self.labels = split.labels.tolist()
        self.transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize(split.mean, split.std)])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(self.reader[index]), self.labels[index]


class BatchReader(data.Dataset[Any]):
    """Whole batches by the key (epoch, indices): from disk if a split has images there, else from memory.

    `is_seeded`: samples of a data set from outside of this project may be random.
    """

    def __init__(self, source: Data, seed: int) -> None:
        self.samples: data.Dataset[Any]
        self.is_seeded, self.seed = not isinstance(source, TensorSet), seed
        if isinstance(source, Split) and source.open_reader:
            self.samples = ImagesOnDisk(source)
        elif isinstance(source, TensorSet):
            self.samples = data.TensorDataset(source.images, source.labels)
        else:
            self.samples = source

    def __getitem__(self, key: tuple[int, list[int]]) -> Any:
        epoch, indices = key
        if self.is_seeded:
            return collate_samples(read_samples(self.samples, indices, self.seed, epoch))
        return collate_samples([self.samples[index] for index in indices])


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
    """A `torch.utils.data.DataLoader`; of a split on disk it delivers normalised float32."""

    def __init__(self, options: DiskOptions, source: Data, sampler: EpochSampler, device: torch.device) -> None:
        super().__init__(sampler)
        self.options = options
        self.buffered = options.num_workers * options.prefetch_factor
        self.device = device
        self.accelerator = accelerator_of(device)
        self.reader = BatchReader(source, sampler.seed)
        # A DataLoader with persistent workers has a single iterator, which a second pass would reset. So each live
        # iterator has its own DataLoader, and a finished one is kept here, with its workers, for the next epoch.
        self._idle: list[tuple[data.DataLoader[Any], BatchKeys]] = []

    def batches(self, number: int, start: int) -> Batches:
        workers = self.options.num_workers
        if not workers and self.reader.is_seeded and threading.current_thread() is not threading.main_thread():
            workers = 1
            log.info(
                "disk: 1 worker in place of num_workers=0: in a background thread, samples would share their random "
                "generators with the training loop"
            )
        with warnings.catch_warnings():
            # torch warns of more workers than cores, but samples that wait for a disk gain from them.
            warnings.filterwarnings("ignore", "This DataLoader will create")
            try:
                dataloader, keys = self._idle.pop()
            except IndexError:
                dataloader, keys = self._build(workers)
            keys.number, keys.start = number, start
            iterator = iter(dataloader)
        is_finished = False
        try:
            while (batch := self._next(iterator)) is not END:
                yield map_tensors(self.accelerator.to_device, batch)
            is_finished = True
        except UserError as error:
            # torch raises a worker's error again with the worker's traceback as its message.
            _, _, message = str(error).rpartition(f"{type(error).__name__}: ")
            raise type(error)(message.strip()) from error
        except (RuntimeError, ConnectionError, EOFError) as error:
            # torch passes on an exception of the data set as "Caught …".
            if not workers or str(error).startswith("Caught "):
                raise
            if isinstance(error, (ConnectionError, EOFError)):  # the pipe from the worker broke
                reason = f"disk: a worker was killed or exited unexpectedly ({error!r})"
                raise LoadingError(f"{reason}; try fewer with data.loader.num_workers=N") from error
            if explained := worker_error(error):
                raise explained from error
            raise
        finally:
            if is_finished and workers and not self._idle:
                self._idle.append((dataloader, keys))
            elif workers:
                _shut_down(iterator)

    def _next(self, iterator: Iterator[Any]) -> Any:
        """The next batch, or `END`.

        torch looks for dead workers only when its timeout expires. So that is short; called again, it keeps waiting.
        """
        started = time.monotonic()
        while True:
            try:
                return next(iterator, END)
            except RuntimeError as error:
                waited, allowed = time.monotonic() - started, self.options.timeout_s
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
            collate_fn=_identity,
            pin_memory=self.options.pin_memory and self.device.type == "cuda",
            prefetch_factor=self.options.prefetch_factor if workers else None,
            persistent_workers=self.options.persistent_workers and workers > 0,
            worker_init_fn=_handle_signals,
            timeout=min(POLL_S, self.options.timeout_s or POLL_S) if workers else 0,
            # DataLoader draws a seed for its workers, from the global generator if it has none.
            generator=torch.Generator(),
        )
        return dataloader, keys


def _identity(batch: Any) -> Any:
    return batch


def _shut_down(iterator: Iterator[Any]) -> None:
    """End the workers now; torch leaves it to the garbage collector, but a traceback may keep the iterator alive."""
    try:
        iterator._shutdown_workers()  # type: ignore[attr-defined]
    except RuntimeError as error:
        if not worker_error(error):  # torch reports dead workers from a signal handler, also here
            raise


def _handle_signals(worker: int) -> None:
    """Let workers outlive Ctrl-C, SIGTERM, …, which are sent to them too; the training process decides when to stop.

    It gets `GRACE_S` to finish its batch. Then a worker exits, since SIGTERM may have been meant for it alone; with 0,
    because for other codes torch raises at any point of the training process.
    """
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: threading.Timer(GRACE_S, os._exit, [0]).start())
