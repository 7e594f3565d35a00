"""Reads batches with the worker processes of a torch `DataLoader`, for `disk`."""

import atexit
import os
import signal
import sys
import threading
import traceback
import weakref
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils import data

from vitmnist.data.datasets.base import Split
from vitmnist.data.sampler import EpochSampler
from vitmnist.data.sources import DatasetSource, SampleSource, TensorSet
from vitmnist.errors import FEWER_WORKERS, LoadingError, UserError, classify_error
from vitmnist.loaders.base import Batches, Loader
from vitmnist.runtime.device import create_queue
from vitmnist.runtime.signals import STOP_SIGNALS
from vitmnist.store.read_in_chunks import return_unchanged
from vitmnist.store.tree import map_batch_tensors

BatchRequest = tuple[int, NDArray[np.int64]]
"""The epoch and the sample IDs of a batch. The epoch is not in the dataset, because persistent workers keep a copy."""


class WorkerLoader(Loader):
    """Reads batches with the workers of a torch `DataLoader`; the images of a split arrive as normalised float32.

    A DataLoader with persistent workers has a single iterator, and a second pass would reset it. Therefore, each live
    epoch has its own DataLoader. A finished epoch leaves its DataLoader, with the workers, to the next epoch.
    """

    def __init__(
        self,
        source: SampleSource,
        sampler: EpochSampler,
        device: torch.device,
        num_workers: int,
        prefetch_factor: int,
        timeout_s: float | None,
    ) -> None:
        super().__init__(sampler)
        self.queue, self.dataset = create_queue(device), BatchDataset(source)
        self.num_workers, self.prefetch_factor, self.timeout_s = num_workers, prefetch_factor, timeout_s
        self.resolved_options, self.batches_ahead = {"num_workers": num_workers}, num_workers * prefetch_factor
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
        batches = self.sampler.sample_ids(epoch, start).split(self.sampler.rank_batch_size)
        requests[:] = [(epoch, sample_ids.numpy()) for sample_ids in batches if len(sample_ids)]
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
        if not workers and self.dataset.is_seeded and threading.current_thread() is not threading.main_thread():
            workers = 1  # Samples would use the random generators of the training loop from this thread.
        return data.DataLoader(
            self.dataset,
            sampler=[],  # `batches` fills it with the requests of an epoch.
            batch_size=None,  # The dataset returns whole batches.
            num_workers=workers,
            collate_fn=return_unchanged,
            pin_memory=self.queue.is_async,
            prefetch_factor=self.prefetch_factor if workers else None,
            persistent_workers=workers > 0,
            worker_init_fn=_prepare_worker,
            timeout=(self.timeout_s or 0) if workers else 0,
            # Without a generator, the DataLoader would draw the seed of its workers from the global generator.
            generator=torch.Generator(),
        )


class SplitSamples(data.Dataset[tuple[Tensor, int]]):
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


class BatchDataset(data.Dataset[Any]):
    """A dataset whose samples are whole batches; a `BatchRequest` takes the place of an index."""

    def __init__(self, source: SampleSource) -> None:
        self.is_seeded = not isinstance(source, TensorSet)  # The samples of a dataset can be random.
        if isinstance(source, TensorSet):
            source.check_on_host()
        self.source = DatasetSource(SplitSamples(source), seed=None) if isinstance(source, Split) else source

    def __getitem__(self, request: BatchRequest) -> object:
        epoch, sample_ids = request
        indices = sample_ids if self.is_seeded else sample_ids % len(self.source)
        try:
            return self.source.read(torch.from_numpy(indices), epoch)
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
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Torch terminates a worker that hangs with this signal.
    # Print no traceback if the training process ends while it receives a batch.
    sys.excepthook = lambda *_: None
    # Skip interpreter shutdown: tearing down torch takes a spawned worker a second. Forked workers skip it anyway.
    atexit.register(os._exit, 0)
