"""Every sample is read when it is needed: picture files in threads, others by the articles' first pipeline."""

from __future__ import annotations

import logging
import signal
import sys
import threading
import traceback
import warnings
import weakref
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils import data

from vitmnist.config.validation import AUTO, config_field
from vitmnist.data.datasets.base import Split
from vitmnist.data.images import empty_images
from vitmnist.data.sampler import EpochSampler, as_tensor
from vitmnist.data.sources import SampleSource
from vitmnist.errors import FEWER_WORKERS, ConfigError, LoadingError, UserError, classify
from vitmnist.loaders.base import LOADERS, Batches, Loader, Place
from vitmnist.runtime.cpu import cores_per_rank, one_core_each
from vitmnist.runtime.device import backend_of
from vitmnist.runtime.ordered_map import ordered_map
from vitmnist.runtime.signals import ignore_stopping
from vitmnist.store.read_once import unchanged
from vitmnist.store.rows import is_large
from vitmnist.store.tree import map_tensors

log = logging.getLogger(__name__)

GROUP = 4  # small pictures that a thread reads at a time: 5% sooner at 64×64 than one by one
WORKERS = 2  # where the number of workers is `auto`
Job = tuple[Tensor, Tensor, range]
"""Images to be filled, uint8 `[B, C, H, W]`, their indices int64 `[B]`, and the rows that a thread fills."""
BatchKey = tuple[int, NDArray[np.int64]]
"""Epoch and indices of a batch; the epoch, because persistent workers keep the dataset that they were started with."""


@dataclass
class DiskOptions:
    """See `conf/data/loader/disk.yaml`."""

    threads: int | str = config_field(AUTO, at_least=1, has_auto=True)
    num_workers: int | str = config_field(AUTO, at_least=0, has_auto=True)
    pin_memory: bool = True
    prefetch_factor: int = config_field(2, at_least=1)
    persistent_workers: bool = True
    timeout_s: float | None = config_field(None, above=0, at_most=1e6)


@LOADERS.register("disk", DiskOptions)
class DiskLoader(Loader):
    """Picture files as uint8 in threads of this process; otherwise, and with typed workers, a DataLoader of torch.

    The latter delivers normalised float32 for a split. With persistent workers it has a single iterator, which a second
    pass would reset. So each live epoch has its own DataLoader, and a finished one is kept, with its workers, for the
    next epoch.
    """

    keeps = Place.NOWHERE

    def __init__(self, options: DiskOptions, source: SampleSource, sampler: EpochSampler, device: torch.device) -> None:
        super().__init__(sampler)
        self.options, self.backend = options, backend_of(device)
        self.pin_memory = options.pin_memory and device.type == "cuda"
        self._idle: list[tuple[data.DataLoader[Any], list[BatchKey]]] = []
        # At interpreter exit multiprocessing would end idle workers by a signal, which torch reports as their failure.
        weakref.finalize(self, self._idle.clear)
        self.split: Split | None = None
        if isinstance(source, Split) and source.files is not None and options.num_workers == AUTO:
            self.split = source
            threads = cores_per_rank() if options.threads == AUTO else options.threads
            self.settings, self.buffered = {"threads": threads}, options.prefetch_factor
            return
        if options.threads != AUTO:
            raise ConfigError(
                f"data.loader.threads={options.threads}: only sets of picture files are read in threads, while "
                "num_workers is auto; type data.loader.threads=auto"
            )
        self.num_workers = WORKERS if options.num_workers == AUTO else int(options.num_workers)
        self.settings = {"num_workers": self.num_workers}
        self.buffered = self.num_workers * options.prefetch_factor
        self.reader = BatchReader(source)

    def batches(self, number: int, start: int) -> Batches:
        return self._from_workers(number, start) if self.split is None else self._from_files(self.split, number, start)

    def _from_files(self, split: Split, number: int, start: int) -> Batches:
        """The batches of an epoch as the decoded set has them, read ahead in threads."""
        files, size = split.files, 1 if is_large(split.images.shape) else GROUP
        assert files is not None

        def jobs() -> Iterator[Job]:
            for indices in self.sampler.batches(number, start):
                rows = as_tensor(indices)
                images = empty_images(len(rows), *split.images.shape[1:], pin_memory=self.pin_memory)
                for first in range(0, len(rows), size):
                    yield images, rows, range(first, min(first + size, len(rows)))

        def read(job: Job) -> Job:
            images, rows, span = job
            # NumPy may write to a tensor that the consumer made in inference mode.
            pixels = images.permute(0, 2, 3, 1).numpy()
            for row in span:
                pixels[row] = np.asarray(files[int(rows[row])]).reshape(pixels.shape[1:])
            return job

        ahead = self.buffered * -(-min(self.sampler.rank_batch_size, self.sampler.size) // size)
        with closing(ordered_map(read, jobs(), self.settings["threads"], ahead, one_core_each())) as done:
            for images, rows, span in done:
                if span.stop == len(rows):
                    yield map_tensors(self.backend.to_device, (images, split.labels[rows]))

    def _from_workers(self, number: int, start: int) -> Batches:
        workers = self.num_workers
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
            keys[:] = [(number, as_tensor(rows).numpy()) for rows in self.sampler.batches(number, start)]
            iterator = iter(dataloader)
        try:
            for batch in iterator:
                yield map_tensors(self.backend.to_device, batch)
            if workers and not self._idle:
                self._idle.append((dataloader, keys))
        except Exception as error:
            if not workers or (explained := _explained(error)) is error:
                raise
            raise explained from error
        finally:
            # The workers end with the iterator, to which frames in the tracebacks of errors refer as well.
            link = sys.exc_info()[1] if workers else None
            while link:
                traceback.clear_frames(link.__traceback__)
                link = link.__context__
            with _deaths_of_workers_unreported():
                del dataloader, iterator

    def close(self) -> None:
        super().close()
        self._idle.clear()  # nothing else refers to these DataLoaders, so their workers end

    def _build(self, workers: int) -> tuple[data.DataLoader[Any], list[BatchKey]]:
        keys: list[BatchKey] = []  # of the batches of an epoch, before each pass
        dataloader: data.DataLoader[Any] = data.DataLoader(
            self.reader,
            sampler=keys,
            batch_size=None,  # a key stands for a whole batch
            num_workers=workers,
            collate_fn=unchanged,
            pin_memory=self.pin_memory,
            prefetch_factor=self.options.prefetch_factor if workers else None,
            persistent_workers=self.options.persistent_workers and workers > 0,
            worker_init_fn=_leave_stopping_to_parent,
            timeout=(self.options.timeout_s or 0) if workers else 0,
            # DataLoader draws a seed for its workers, from the global generator if it has none.
            generator=torch.Generator(),
        )
        return dataloader, keys


class BatchReader(data.Dataset[Any]):
    """Whole batches by the key (epoch, indices): from disk if a split has images there, else from memory.

    `is_seeded` is true for datasets from outside this project, whose samples may be random.
    """

    def __init__(self, source: SampleSource) -> None:
        self.source, self.is_seeded = source.stored(), not source.is_decoded

    def __getitem__(self, key: BatchKey) -> object:
        epoch, indices = key
        return self.source.read(torch.from_numpy(indices), epoch)


def _explained(error: Exception) -> Exception:
    """The error of a worker, or of its death, as a user should see it."""
    if isinstance(error, UserError):
        # torch raises a worker's error again with the worker's traceback as its message.
        _, _, message = str(error).rpartition(f"{type(error).__name__}: ")
        return type(error)(message.strip())
    if str(error).startswith("Caught "):  # so torch passes on an exception of the dataset
        return error
    if isinstance(error, (ConnectionError, EOFError)):  # the pipe from the worker broke
        return LoadingError(f"disk: a worker was killed or exited unexpectedly ({error!r}); {FEWER_WORKERS}")
    failure = classify(error)
    return LoadingError(failure.message) if failure.cause == "worker" else error


@contextmanager
def _deaths_of_workers_unreported() -> Iterator[None]:
    """Suspend torch's handler of SIGCHLD: where a worker was killed, it would raise in the iterator's `__del__`."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGCHLD"):
        yield
        return
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, handler or signal.SIG_DFL)


def _leave_stopping_to_parent(worker: int) -> None:
    """Let a worker outlive Ctrl-C, which it gets too: the training process may need its batches for a last step."""
    ignore_stopping()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # by which torch ends a worker that hangs
