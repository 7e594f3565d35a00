"""Builds a loader by name, for scripts without a configuration."""

import os
from typing import Any

import torch
from torch import Tensor

from vitmnist.data.sampler import EpochSampler
from vitmnist.data.sources import Data, TensorSet, as_source
from vitmnist.errors import ConfigError
from vitmnist.loaders.auto import AutoOptions, build_fastest_loader
from vitmnist.loaders.base import LOADERS, Loader
from vitmnist.runtime.device import choose_device
from vitmnist.runtime.memory import keep_freed_memory
from vitmnist.timing.benchmark import StepFunction


def make_loader(
    name: str,
    data: Data,
    *,
    batch_size: int,
    device: torch.device | str,
    seed: int,
    shuffle: str = "sample",
    drop_last: bool = False,
    step: StepFunction | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    labels: Tensor | None = None,
    **options: Any,
) -> Loader:
    """Build a loader by name: `for images, labels in make_loader("ram", …).epoch(0)`.

    On the CPU, this sets glibc's `mallopt` for the whole process: it keeps up to 2 GiB of freed memory for the next
    batch. `ctypes.CDLL(None).malloc_trim(0)` returns the memory to the system.

    Args:
        name: disk, ram, gpu_slice, prefetch, cache, auto, or a name of your own that you passed to `register`.
        data: a split of `load_dataset`; a pair `(images, labels)` of tensors or NumPy arrays with the same first
            dimension, which are not copied; or any map-style `torch.utils.data.Dataset` without `set_epoch`. All but
            disk and prefetch of disk refuse random samples; a generator that is made for each sample, such as
            `default_rng()`, and `secrets` go undetected.
        batch_size: number of samples in a batch, over all ranks.
        device: where batches are delivered; `auto` is the current CUDA device, or the CPU.
        seed: determines the order, at least 0; every loader delivers the same batches for the same seed, but `disk`
            delivers the images of a split without files normalised, which `Preprocess` does to those of the others.
        shuffle: sample, balanced, batch or none; see `EpochSampler`.
        drop_last: leave out a last batch shorter than `batch_size`.
        step: a function `step(batch)` that trains on a batch, with which `auto` times its candidates. It trains on a
            few dozen batches per candidate: give it a copy of the model, or load the model's weights afterwards. Random
            generators are restored.
        rank: the rank of this process. It gets a part of every batch. Default: the rank in `torch.distributed`.
        world_size: the number of ranks; required with `rank`.
        labels: the class of each sample for `shuffle="balanced"`, int64 `[N]`; by default the labels of `data`, which a
            map-style dataset lacks.
        options: the keys of the loader's YAML file in `conf/data/loader/`, such as `num_workers=4`. `base` of prefetch
            is a name, or a dict with `name` and options; without it `ram` for tensors, `disk` for a dataset.

    Raises:
        ConfigError: an unknown name or option, a loader that cannot load such data, or an unknown rank under torchrun.
        DataError: data that cannot be used, such as images and labels of different lengths.
    """
    source = as_source(data, seed)
    rank, world_size = _resolve_ranks(rank, world_size)
    if shuffle == "balanced" and labels is None and isinstance(source, TensorSet):
        labels = source.labels
    sampler = EpochSampler(len(source), batch_size, seed, shuffle, drop_last, rank, world_size, labels)
    target = choose_device(str(device))
    if target.type == "cpu":
        keep_freed_memory()
    build, loader_options = LOADERS.resolve({"name": name, **options}, key="", complete=True)
    if isinstance(loader_options, AutoOptions):
        return build_fastest_loader(loader_options, source, sampler, target, step)
    return build(loader_options, source, sampler, target)


def _resolve_ranks(rank: int | None, world_size: int | None) -> tuple[int, int]:
    if (rank is None) != (world_size is None):
        raise ConfigError("rank= and world_size= belong together; give both")
    if rank is None or world_size is None:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_rank(), torch.distributed.get_world_size()
        if (size := os.environ.get("WORLD_SIZE", "1")) != "1":  # Each rank would silently train on all batches.
            raise ConfigError(
                f"WORLD_SIZE={size}: torchrun has started several processes, and each needs its part of a batch; call "
                "torch.distributed.init_process_group() before, or give rank= and world_size="
            )
        return 0, 1
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank={rank}: must be at least 0 and below world_size={world_size}")
    return rank, world_size
