"""What the workers of `disk` do: read the samples of a batch and collate them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils import data

from vitmnist.data.collate import collate_samples
from vitmnist.data.datasets.base import Split
from vitmnist.data.decoding import collate_named
from vitmnist.data.sampler import EpochSampler, as_tensor
from vitmnist.data.seeding import read_samples
from vitmnist.data.tensors import TensorSet
from vitmnist.loaders.base import Data


class ImagesOnDisk(data.Dataset[tuple[Tensor, int]]):
    """Sample i of a split: its image on disk as a normalised tensor, and its label."""

    def __init__(self, split: Split) -> None:
        from torchvision import transforms  # takes 2 s, and only this loader needs it

        self.reader = split.reader
        self.labels = split.labels.tolist()
        self.transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize(split.mean, split.std)])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(self.reader[index]), self.labels[index]


class BatchReader(data.Dataset[Any]):
    """Whole batches by the key (epoch, indices): from disk if a split has images there, else from memory.

    `is_seeded` is true for datasets from outside this project, whose samples may be random.
    """

    def __init__(self, source: Data, seed: int) -> None:
        self.samples: data.Dataset[Any]
        self.is_seeded, self.seed = not isinstance(source, TensorSet), seed
        if isinstance(source, Split) and source.reader:
            self.samples = ImagesOnDisk(source)
        elif isinstance(source, TensorSet):
            self.samples = data.TensorDataset(source.images, source.labels)
        else:
            self.samples = source

    def __getitem__(self, key: tuple[int, list[int]]) -> Any:
        epoch, indices = key
        if self.is_seeded:
            return collate_named(read_samples(self.samples, indices, self.seed, epoch), indices)
        return collate_samples([self.samples[index] for index in indices])


class BatchKeys(data.Sampler[tuple[int, list[int]]]):
    """The keys of the batches of an epoch; `number` and `start` are set before each pass.

    The epoch is part of the key because persistent workers keep the dataset that they were started with.
    """

    def __init__(self, sampler: EpochSampler) -> None:
        self.sampler = sampler
        self.number = self.start = 0

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        for indices in self.sampler.batches(self.number, self.start):
            yield self.number, as_tensor(indices).tolist()
