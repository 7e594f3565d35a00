"""The set is decoded once into a memory-mapped file; a batch is gathered from its pages."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from vitmnist.data.datasets.base import Split
from vitmnist.data.decoded_cache import DEFAULT_FOLDER, Chunks, decode_once, decode_temporarily
from vitmnist.data.decoding import iter_pairs, refuse_random
from vitmnist.data.sampler import EpochSampler
from vitmnist.data.tensors import TensorSet, digest
from vitmnist.loaders.base import LOADERS, Data
from vitmnist.loaders.pinned import HostLoader
from vitmnist.runtime.files import home_expanded


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

    def __init__(self, options: CacheOptions, data: Data, sampler: EpochSampler, device: torch.device) -> None:
        super().__init__(map_from_cache(data, options, sampler.seed), sampler, device)


def map_from_cache(data: Data, options: CacheOptions, seed: int) -> TensorSet:
    """The set as a memory-mapped file.

    The cache is identified by a fingerprint. That of tensors is their content. The content of a dataset that is read
    sample by sample is unknown, so without `options.fingerprint` it is decoded for this loader only.
    """
    folder = home_expanded(options.folder)
    if not isinstance(data, TensorSet):
        refuse_random("cache", data, seed)
        decode, size = partial(iter_pairs, data, seed), len(data)  # type: ignore[arg-type]  # torch has no __len__
        if options.fingerprint:
            entry = decode_once(folder, f"{options.fingerprint}, {size} samples", size, decode)
        else:
            entry = decode_temporarily(folder, size, decode)
        images, labels = entry.mapped
        return TensorSet(images, entry.checksums[1].checked(labels), mapped=entry.checksums[0])
    data.check_on_host()
    if data.mapped or not len(data):
        return data
    checksum = (data.sha256 if isinstance(data, Split) else None) or digest(data.images)
    fingerprint = f"{data.images.dtype} {list(data.images.shape)} {checksum}"
    entry = decode_once(folder, fingerprint, len(data), partial(_chunks, data))
    return TensorSet(entry.mapped[0], data.labels, mapped=entry.checksums[0])


def _chunks(tensors: TensorSet, size: int = 1024) -> Chunks:
    return zip(tensors.images.split(size), tensors.labels.split(size), strict=True)
