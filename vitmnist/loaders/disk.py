"""`disk` reads samples when they are needed: image files in threads, others in the workers of a `DataLoader`."""

import atexit
import os
import signal
import sys
import threading
import traceback
import weakref
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils import data

from vitmnist.config.validation import AUTO, config_field
from vitmnist.data.datasets.base import ImageFiles, Split
from vitmnist.data.sampler import EpochSampler
from vitmnist.data.sources import DatasetSource, SampleSource, TensorSet
from vitmnist.errors import FEWER_WORKERS, ConfigError, DataError, LoadingError, UserError, classify_error
from vitmnist.loaders.base import LOADERS, Batches, Loader
from vitmnist.runtime.background_map import BackgroundMap
from vitmnist.runtime.cpu import cores_per_rank, decoder_thread_context
from vitmnist.runtime.device import create_queue
from vitmnist.runtime.signals import ignore_stop_signals
from vitmnist.store.read_in_chunks import return_unchanged
from vitmnist.store.tree import map_batch_tensors

DEFAULT_WORKERS = 2
"""The number of workers for `num_workers=auto`."""
ReadJob = tuple[Tensor, Tensor, int]
"""The images of a batch, uint8 `[B, C, H, W]`, their indices, int64 `[B]`, and the row for a thread to fill."""
BatchRequest = tuple[int, NDArray[np.int64]]
"""The epoch and the `draws` of a batch. The epoch is not in the dataset, because persistent workers keep a copy."""


@dataclass
class DiskOptions:
    """See `conf/data/loader/disk.yaml`."""

    threads: int | str = config_field(AUTO, at_least=1, allows_auto=True)
    num_workers: int | str = config_field(AUTO, at_least=0, allows_auto=True)
    prefetch_factor: int = config_field(2, at_least=1)
    timeout_s: float | None = config_field(None, above=0, at_most=1e6)


@LOADERS.register("disk", DiskOptions)
def build_disk_loader(
    options: DiskOptions, source: SampleSource, sampler: EpochSampler, device: torch.device
) -> Loader:
    """Build a `FileLoader` for image files unless `num_workers` is set, otherwise a `WorkerLoader`.

    Raises:
        ConfigError: `threads` is set, but would have no effect.
    """
    if isinstance(source, Split) and source.files is not None and options.num_workers == AUTO:
        return FileLoader(options, source, source.files, sampler, device)
    if options.threads != AUTO:
        reason = "num_workers is set too" if options.num_workers != AUTO else "these samples have no files"
        raise ConfigError(f"threads={options.threads}: threads read only image files, and {reason}; set threads=auto")
    return WorkerLoader(options, source, sampler, device)


class FileLoader(Loader):
    """Reads the image files of a split as uint8, ahead of the consumer, in threads of this process."""

    def __init__(
        self, options: DiskOptions, split: Split, files: ImageFiles, sampler: EpochSampler, device: torch.device
    ) -> None:
        super().__init__(sampler)
        self.split, self.files, self.queue = split, files, create_queue(device)
        self.threads = cores_per_rank() if options.threads == AUTO else int(options.threads)
        self.resolved_options, self.batches_ahead = {"threads": self.threads}, options.prefetch_factor

    def batches(self, epoch: int, start: int) -> Batches:
        images_ahead = self.batches_ahead * min(self.sampler.rank_batch_size, self.sampler.size)
        jobs = self._jobs(epoch, start)
        reader = BackgroundMap(self._read, jobs, self.threads, images_ahead, decoder_thread_context())
        with closing(reader) as finished_jobs:
            for images, indices, row in finished_jobs:
                if row == len(indices) - 1:  # Rows finish in order, so this row completes its batch.
                    labels = self.split.labels[indices]
                    labels = labels.pin_memory() if self.queue.is_async else labels
                    yield map_batch_tensors(self.queue.to_device, (images, labels))

    def _jobs(self, epoch: int, start: int) -> Iterator[ReadJob]:
        for indices in self.sampler.indices(epoch, start).split(self.sampler.rank_batch_size):
            images = torch.empty_like(self.split.images[: len(indices)], pin_memory=self.queue.is_async)
            for row in range(len(indices)):
                yield images, indices, row

    def _read(self, job: ReadJob) -> ReadJob:
        images, indices, row = job
        index = int(indices[row])
        values = np.asarray(self.files[index])
        values = values[:, :, None] if values.ndim == 2 else values
        # Write with NumPy: if the consumer is in inference mode, torch cannot write to its tensor in this thread.
        pixels = images.permute(0, 2, 3, 1).numpy()[row]
        if values.shape != pixels.shape:  # A custom reader can return other shapes.
            path = self.files.folder / self.files.names[index]
            raise DataError(f"{path}: is read as {values.shape}, and must be [H, W, C] = {pixels.shape}")
        pixels[:] = values
        return job


class WorkerLoader(Loader):
    """Reads batches with the workers of a torch `DataLoader`; the images of a split arrive as normalised float32.

    A DataLoader with persistent workers has a single iterator, and a second pass would reset it. Therefore, each live
    epoch has its own DataLoader. A finished epoch leaves its DataLoader, with the workers, to the next epoch.
    """

    def __init__(self, options: DiskOptions, source: SampleSource, sampler: EpochSampler, device: torch.device) -> None:
        super().__init__(sampler)
        self.options, self.queue, self.reader = options, create_queue(device), BatchReader(source)
        self.num_workers = DEFAULT_WORKERS if options.num_workers == AUTO else int(options.num_workers)
        self.resolved_options = {"num_workers": self.num_workers}
        self.batches_ahead = self.num_workers * options.prefetch_factor
        self._idle: list[data.DataLoader[Any]] = []
        # At interpreter exit, multiprocessing would otherwise kill idle workers, and torch would report a failure.
        weakref.finalize(self, self._idle.clear)

    def batches(self, epoch: int, start: int) -> Batches:
        try:
            dataloader = self._idle.pop()
        except IndexError:  # A check beforehand would race with other threads.
            dataloader = self._build_dataloader()
        workers = dataloader.num_workers
        requests = cast(list[BatchRequest], dataloader.sampler)
        draws = self.sampler.draws(epoch, start).split(self.sampler.rank_batch_size)
        requests[:] = [(epoch, batch.numpy()) for batch in draws if len(batch)]
        iterator = iter(dataloader)
        try:
            for batch in iterator:
                if isinstance(batch, UserError):
                    raise batch
                yield map_batch_tensors(self.queue.to_device, batch)
            if workers and not self._idle:
                self._idle.append(dataloader)
        except Exception as error:
            if not workers or (translated := _translate_worker_error(error)) is error:
                raise
            raise translated from error
        finally:
            # Workers exit with the last reference to the iterator. Traceback frames hold references too, so clear them.
            exception = sys.exc_info()[1] if workers else None
            while exception:
                traceback.clear_frames(exception.__traceback__)
                exception = exception.__context__
            del dataloader, iterator

    def close(self) -> None:
        super().close()
        self._idle.clear()  # Without a reference to these DataLoaders, their workers end.

    def _build_dataloader(self) -> data.DataLoader[Any]:
        workers = self.num_workers
        if not workers and self.reader.is_seeded and threading.current_thread() is not threading.main_thread():
            workers = 1  # Samples would use the random generators of the training loop from this thread.
        return data.DataLoader(
            self.reader,
            sampler=[],  # `batches` fills it with the requests of an epoch.
            batch_size=None,  # The dataset returns whole batches.
            num_workers=workers,
            collate_fn=return_unchanged,
            pin_memory=self.queue.is_async,
            prefetch_factor=self.options.prefetch_factor if workers else None,
            persistent_workers=workers > 0,
            worker_init_fn=_prepare_worker,
            timeout=(self.options.timeout_s or 0) if workers else 0,
            # Without a generator, the DataLoader would draw the seed of its workers from the global generator.
            generator=torch.Generator(),
        )


class ImagesOnDisk(data.Dataset[tuple[Tensor, int]]):
    """Samples of a split, read from files if it has them: normalised float32 `[C, H, W]`, and a label."""

    def __init__(self, split: Split) -> None:
        from torchvision import transforms  # This import takes 2 s, and `FileLoader` does not need it.

        self.images = split.images.permute(0, 2, 3, 1).numpy() if split.files is None else split.files
        self.labels = split.labels.tolist()
        self.transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize(split.mean, split.std)])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(self.images[index]), self.labels[index]


class BatchReader(data.Dataset[Any]):
    """A dataset whose samples are whole batches; a `BatchRequest` takes the place of an index."""

    def __init__(self, source: SampleSource) -> None:
        self.is_seeded = not isinstance(source, TensorSet)  # The samples of a dataset can be random.
        if isinstance(source, TensorSet):
            source.check_on_host()
        self.source = DatasetSource(ImagesOnDisk(source), seed=None) if isinstance(source, Split) else source

    def __getitem__(self, request: BatchRequest) -> object:
        epoch, draws = request
        try:
            return self.source.read(torch.from_numpy(draws if self.is_seeded else draws % len(self.source)), epoch)
        except UserError as error:
            return error  # Torch would only keep the text of an exception.


def _translate_worker_error(error: Exception) -> Exception:
    """Turn the death of a worker into a `LoadingError`; return an exception of the dataset as it is."""
    if isinstance(error, UserError) or str(error).startswith("Caught "):  # Torch's prefix for errors of a dataset
        return error
    if isinstance(error, (ConnectionError, EOFError)):  # The pipe from the worker broke.
        return LoadingError(f"disk: a worker was killed or exited unexpectedly ({error!r}); {FEWER_WORKERS}")
    failure = classify_error(error)
    return LoadingError(failure.message) if failure.cause == "worker" else error


def _prepare_worker(worker: int) -> None:
    """Keep a worker alive after Ctrl-C: the training process can need its batches for a last step."""
    ignore_stop_signals()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Torch terminates a worker that hangs with this signal.
    # Print no traceback if the training process ends while it receives a batch.
    sys.excepthook = lambda *_: None
    # Skip interpreter shutdown: tearing down torch takes a spawned worker a second. Forked workers skip it anyway.
    atexit.register(os._exit, 0)
