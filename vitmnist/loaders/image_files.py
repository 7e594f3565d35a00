"""Batches of image files, which threads of this process read, decode and resize."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import numpy as np
from torch import Tensor

from vitmnist.data.datasets.base import Split
from vitmnist.data.images import empty_images
from vitmnist.data.sampler import EpochSampler, as_tensor
from vitmnist.loaders.base import Batches
from vitmnist.runtime.cpu import one_core_each
from vitmnist.runtime.ordered_map import ordered_map
from vitmnist.store.rows import is_large

GROUP = 4  # small pictures that a thread reads at a time: 5% sooner at 64×64 than one by one

Job = tuple[Tensor, Tensor, range]
"""Images to be filled, uint8 `[B, C, H, W]`, their indices int64 `[B]`, and the rows that a thread fills."""


def read_batches(
    source: Split, sampler: EpochSampler, epoch: int, start: int, *, threads: int, ahead: int, pin_memory: bool
) -> Batches:
    """The batches of an epoch on the host: uint8 images as the decoded set has them, and their labels.

    Args:
        source: with `files`, and their `reader`.
        ahead: how many batches may be read before they are asked for.

    Raises:
        DataError: a picture cannot be read; names it, in place of its batch.
    """
    size = 1 if is_large(source.images.shape) else GROUP

    def jobs() -> Iterator[Job]:
        for indices in sampler.batches(epoch, start):
            rows = as_tensor(indices)
            images = empty_images(len(rows), *source.images.shape[1:], pin_memory=pin_memory)
            for first in range(0, len(rows), size):
                yield images, rows, range(first, min(first + size, len(rows)))

    def read(job: Job) -> Job:
        images, rows, span = job
        # NumPy may write to a tensor that the consumer made in inference mode.
        pixels = images.permute(0, 2, 3, 1).numpy()
        for row in span:
            pixels[row] = np.asarray(source.reader[int(rows[row])]).reshape(pixels.shape[1:])
        return job

    jobs_ahead = ahead * -(-min(sampler.batch_size, sampler.size) // size)
    with closing(ordered_map(read, jobs(), threads, jobs_ahead, one_core_each())) as done:
        for images, rows, span in done:
            if span.stop == len(rows):
                yield images, source.labels[rows]
