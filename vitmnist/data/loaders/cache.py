"""The set is decoded once into a file that is mapped into memory; a batch is gathered from its pages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from vitmnist.data.datasets.base import Split
from vitmnist.data.decoded_cache import decode_for_now, decode_once
from vitmnist.data.decoding import pairs, refuse_random
from vitmnist.data.loaders.base import LOADERS, Data
from vitmnist.data.loaders.pinned import HostLoader
from vitmnist.data.sampler import EpochSampler
from vitmnist.data.tensors import TensorSet, digest


@dataclass
class CacheOptions:
    """See `conf/data/loader/cache.yaml`."""

    folder: str = "~/.cache/vitmnist/vitmnist-cache"
    fingerprint: str | None = None
    verify: bool = True
    frozen: bool = False


@LOADERS.register("cache", CacheOptions)
class CacheLoader(HostLoader):
    """For sets larger than memory: pages come in as they are needed, and go when memory is.

    Raises:
        ConfigError: the samples of a map-style data set are random, and the options do not say `frozen`.
        DataError: the folder cannot be written.
    """

    def __init__(self, options: CacheOptions, data: Data, sampler: EpochSampler, device: torch.device) -> None:
        super().__init__(cached(data, options, sampler.seed), sampler, device)


def cached(data: Data, options: CacheOptions, seed: int) -> TensorSet:
    """The set as a mapped file.

    The cache is found again by the fingerprint: of arrays that is their content; a data set that is read sample by
    sample cannot tell what it holds, so without a fingerprint given it is decoded for this loader alone.
    """
    folder = Path(options.folder).expanduser()
    if not isinstance(data, TensorSet):
        if not options.frozen:
            refuse_random("cache", data, seed)
        decode = partial(pairs, data, seed)
        if options.fingerprint is None:
            return decode_for_now(folder, decode)
        named = f"{options.fingerprint}, {len(data)} samples"  # type: ignore[arg-type]
        if options.frozen:  # random samples are those of one seed
            named += f", seed {seed}"
        return decode_once(folder, named, decode, verify=options.verify).arrays
    data.check_on_host()
    if data.mapped or not len(data):
        return data
    known = data.sha256 if isinstance(data, Split) else None
    fingerprint = f"{data.images.dtype} {list(data.images.shape)} {known or digest(data.images)}"
    stored = decode_once(folder, fingerprint, partial(_chunks, data), verify=options.verify)
    return TensorSet(stored.arrays.images, data.labels, mapped=True)


def _chunks(arrays: TensorSet, size: int = 1024) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(arrays.images.split(size), arrays.labels.split(size), strict=True)
