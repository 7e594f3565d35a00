"""The articles' first pipeline: every sample is read from disk and transformed by itself when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils import data
from torchvision import transforms

from vitmnist.config import bounded
from vitmnist.data.dataset import Split
from vitmnist.data.idx import read_shape
from vitmnist.data.loaders.contract import LOADERS, Batch, Batches, Loader
from vitmnist.data.order import EpochOrder


class ImagesOnDisk(data.Dataset[tuple[Tensor, int]]):
    """Image i of an unpacked IDX file, through a memory map, as PIL image, tensor, normalised tensor; and its label."""

    def __init__(self, split: Split) -> None:
        self.path = split.images_file.on_disk()
        self.labels = split.labels.tolist()
        self.transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize(split.mean, split.std)])
        self._pixels: np.memmap | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        # Mapped by the process that reads: a mapping sent to a worker would arrive as a copy of the whole file.
        if self._pixels is None:
            self._pixels = _map_images(self.path)
        return self.transform(Image.fromarray(self._pixels[index])), self.labels[index]


def _map_images(path: Path) -> np.memmap:
    with path.open("rb") as file:
        shape = read_shape(file.read(16), path)
    return np.memmap(path, np.uint8, "r", offset=4 + 4 * len(shape), shape=shape)


class EpochBatches(data.Sampler[list[int]]):
    """The indices of one epoch's batches; `number` and `start` are set before each pass."""

    def __init__(self, order: EpochOrder) -> None:
        self.order = order
        self.number = 0
        self.start = 0

    def __iter__(self) -> Iterator[list[int]]:
        for indices in self.order.batches(self.number, self.start):
            if isinstance(indices, slice):
                yield list(range(indices.start, indices.stop))
            else:
                yield indices.tolist()


@dataclass
class DiskOptions:
    """See `conf/data/loader/disk.yaml`."""

    num_workers: int = bounded(2, at_least=0)
    pin_memory: bool = True
    prefetch_factor: int = bounded(2, at_least=1)
    persistent_workers: bool = True


@LOADERS.register("disk", DiskOptions)
class DiskLoader(Loader):
    """A `torch.utils.data.DataLoader` over `ImagesOnDisk`, which delivers float32, normalised."""

    def __init__(self, options: DiskOptions, split: Split, order: EpochOrder, device: torch.device) -> None:
        super().__init__(order)
        self.options = options
        self.device = device
        self.samples = ImagesOnDisk(split)
        # A DataLoader with persistent workers has one iterator, which a second pass would reset. So each live
        # iterator has a DataLoader of its own, and one that has finished waits here with its workers for the next.
        self._idle: list[tuple[data.DataLoader[Batch], EpochBatches]] = []

    def batches(self, number: int, start: int) -> Batches:
        try:
            dataloader, batches = self._idle.pop()
        except IndexError:
            dataloader, batches = self._build()
        batches.number, batches.start = number, start
        samples = iter(dataloader)
        finished = False
        try:
            for images, labels in samples:
                yield images.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True)
            finished = True
        finally:
            if finished and not self._idle:
                self._idle.append((dataloader, batches))
            elif self.options.num_workers:
                # torch leaves this to the garbage collector, but the traceback of an exception keeps the iterator.
                samples._shutdown_workers()  # type: ignore[attr-defined]

    def close(self) -> None:
        super().close()
        # Nothing else refers to an idle DataLoader, and its workers end with it.
        self._idle.clear()

    def _build(self) -> tuple[data.DataLoader[Batch], EpochBatches]:
        batches = EpochBatches(self.order)
        workers = self.options.num_workers
        dataloader: data.DataLoader[Batch] = data.DataLoader(
            self.samples,  # type: ignore[arg-type]
            batch_sampler=batches,
            num_workers=workers,
            pin_memory=self.options.pin_memory and self.device.type == "cuda",
            prefetch_factor=self.options.prefetch_factor if workers else None,
            persistent_workers=self.options.persistent_workers and workers > 0,
            # DataLoader draws a seed for its workers even where nothing is random; not from the global generator.
            generator=torch.Generator(),
        )
        return dataloader, batches
