"""The set is decoded once into a memory-mapped file; a batch is gathered from its pages."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vitmnist.data.sampler import EpochSampler
from vitmnist.data.sources import SampleSource
from vitmnist.loaders.base import LOADERS, Place
from vitmnist.loaders.ram import HostLoader
from vitmnist.runtime.files import home_expanded
from vitmnist.store.cache_file import DEFAULT_FOLDER


@dataclass
class CacheOptions:
    """See `conf/data/loader/cache.yaml`."""

    folder: str = DEFAULT_FOLDER
    fingerprint: str | None = None


@LOADERS.register("cache", CacheOptions)
class CacheLoader(HostLoader):
    """For sets larger than memory: the system reads pages on demand, and drops them when memory is short.

    Raises:
        ConfigError: the samples of a map-style dataset are random.
        DataError: the folder cannot be written.
        DoesNotFitError: its disk has too little room.
    """

    keeps = Place.FILE

    def __init__(self, options: CacheOptions, data: SampleSource, sampler: EpochSampler, device: torch.device) -> None:
        super().__init__(data.in_file(home_expanded(options.folder), options.fingerprint), sampler, device)
