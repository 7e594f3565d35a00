"""`disk` reads samples when they are needed: image files in threads, others in the workers of a `DataLoader`."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vitmnist.config.validation import AUTO, config_field
from vitmnist.data.datasets.base import ImageFiles, Split
from vitmnist.data.sampler import EpochSampler
from vitmnist.data.sources import SampleSource
from vitmnist.errors import DataError
from vitmnist.loaders.base import LOADERS, Batches, Loader
from vitmnist.loaders.workers import WorkerLoader
from vitmnist.runtime.background_map import BackgroundMap
from vitmnist.runtime.cpu import cores_per_rank, create_decoder_context
from vitmnist.runtime.device import create_queue
from vitmnist.store.rows import as_contiguous_rows

ReadJob = tuple[Tensor, Tensor, int]
"""The images of a batch, uint8 `[B, C, H, W]`, their indices, int64 `[B]`, and the row for a thread to fill."""


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
    """Build a `FileLoader` for image files unless `num_workers` is set, otherwise a `WorkerLoader`."""
    if isinstance(source, Split) and source.files is not None and options.num_workers == AUTO:
        threads = cores_per_rank() if options.threads == AUTO else int(options.threads)
        return FileLoader(source, source.files, sampler, device, threads, options.prefetch_factor)
    num_workers = 2 if options.num_workers == AUTO else int(options.num_workers)
    return WorkerLoader(source, sampler, device, num_workers, options.prefetch_factor, options.timeout_s)


class FileLoader(Loader):
    """Reads the image files of a split as uint8, ahead of the consumer, in threads of this process."""

    def __init__(
        self,
        split: Split,
        files: ImageFiles,
        sampler: EpochSampler,
        device: torch.device,
        threads: int,
        batches_ahead: int,
    ) -> None:
        super().__init__(sampler)
        self.split, self.files, self.queue = split, files, create_queue(device)
        self.threads, self.batches_ahead = threads, batches_ahead
        self.resolved_options = {"threads": threads}

    def batches(self, epoch: int, start: int) -> Batches:
        images_ahead = self.batches_ahead * min(self.sampler.rank_batch_size, self.sampler.size)
        jobs = self._jobs(epoch, start)
        finished_jobs = BackgroundMap(self._read, jobs, self.threads, images_ahead, create_decoder_context())
        with closing(finished_jobs):
            for images, indices, row in finished_jobs:
                if row == len(indices) - 1:  # Rows finish in order, so this row completes its batch.
                    labels = self.queue.empty_pinned((len(indices),), torch.int64)
                    torch.index_select(self.split.labels, 0, indices, out=labels)
                    yield self.queue.to_device(images), self.queue.to_device(labels)

    def _jobs(self, epoch: int, start: int) -> Iterator[ReadJob]:
        rows = as_contiguous_rows(self.split.images)
        indices_of_epoch = self.sampler.sample_ids(epoch, start) % self.sampler.size
        for indices in indices_of_epoch.split(self.sampler.rank_batch_size):
            images = self.queue.empty_pinned((len(indices), *rows.shape[1:]), rows.dtype)
            images = images if rows is self.split.images else images.permute(0, 3, 1, 2)
            for row in range(len(indices)):
                yield images, indices, row

    def _read(self, job: ReadJob) -> ReadJob:
        images, indices, row = job
        index = int(indices[row])
        values = np.asarray(self.files[index])
        values = values[:, :, None] if values.ndim == 2 else values
        # Write with NumPy: if the consumer is in inference mode, torch cannot write to its tensor in this thread.
        pixels = images.permute(0, 2, 3, 1).numpy()[row]
        if (values.shape, values.dtype) != (pixels.shape, pixels.dtype):  # A custom reader can return others.
            path = self.files.folder / self.files.names[index]
            raise DataError(f"{path}: is read as {values.dtype} {values.shape}, and must be uint8 {pixels.shape}")
        pixels[:] = values
        return job
