"""CIFAR-10 and CIFAR-100, read by torchvision, which compares the files with their published MD5."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from vitmnist.data.datasets.base import DATASETS, Dataset, SizeOptions, dataset_in_memory, stamps
from vitmnist.data.datasets.downloading import download


@dataclass(unsafe_hash=True)
class CifarOptions(SizeOptions):
    """See `conf/data/dataset/cifar10.yaml`."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """`[C, H, W]` of the images."""
        return 3, 32, 32


@DATASETS.register("cifar10", CifarOptions)
def cifar10(sizes: CifarOptions, root: Path) -> Dataset:
    """CIFAR-10 (Krizhevsky, 2009), from `root` or by torchvision's downloader."""
    from torchvision.datasets import CIFAR10  # takes 2 s

    return _read("cifar10", CIFAR10, root, stamps((root / CIFAR10.base_folder).glob("*")), sizes)


@DATASETS.register("cifar100", CifarOptions)
def cifar100(sizes: CifarOptions, root: Path) -> Dataset:
    """CIFAR-100 (Krizhevsky, 2009) with its 100 fine labels, from `root` or by torchvision's downloader."""
    from torchvision.datasets import CIFAR100

    return _read("cifar100", CIFAR100, root, stamps((root / CIFAR100.base_folder).glob("*")), sizes)


@lru_cache(maxsize=1)  # the jobs of a sweep share one set; keeping more would cost memory
def _read(name: str, source: Any, root: Path, stamps: object, sizes: SizeOptions) -> Dataset:
    """The data set of a torchvision class, read again only if its files have changed (`stamps`)."""
    # Nothing is downloaded if the files are there; an archive that is there is unpacked.
    train = download(source.__name__, root, lambda: source(str(root), download=True), [source.filename], root)
    train_pair, test_pair = (
        (torch.from_numpy(part.data).permute(0, 3, 1, 2).contiguous(), torch.tensor(part.targets))
        for part in (train, source(str(root), train=False))
    )
    return dataset_in_memory(name, train_pair, test_pair, tuple(train.classes), sizes)
