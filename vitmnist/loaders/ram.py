"""The whole set is in host memory; a batch is gathered there and copied to the run's device."""

from __future__ import annotations

import torch

from vitmnist.data.sampler import EpochSampler
from vitmnist.data.tensors import SampleSource
from vitmnist.loaders.base import LOADERS, Place
from vitmnist.loaders.pinned import HostLoader
from vitmnist.registry import NoOptions
from vitmnist.runtime.memory import Memory, check_fits


@LOADERS.register("ram")
class RamLoader(HostLoader):
    """Reads a map-style dataset into memory first, sample by sample.

    Raises:
        ConfigError: its samples are random.
        DoesNotFitError: host memory is too small for what must be read into it.
    """

    keeps = Place.HOST

    def __init__(self, options: NoOptions, data: SampleSource, sampler: EpochSampler, device: torch.device) -> None:
        needs = Memory(host=data.bytes_to_load(torch.device("cpu")))
        check_fits("ram", needs, device, others=("cache", "disk"))
        self.decoded = data.in_memory()
        super().__init__(self.decoded, sampler, device)
