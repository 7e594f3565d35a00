"""How much of a set `gpu_slice` keeps on the device: a fraction, or what fits next to the model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vitmnist.config.validation import AUTO, or_auto
from vitmnist.data.sampler import EpochSampler
from vitmnist.data.tensors import TensorSet
from vitmnist.loaders.base import LOADERS, Data
from vitmnist.runtime.backend import backend_of
from vitmnist.runtime.memory import DoesNotFitError, Memory, free_memory_at, mib

BATCHES = 4  # on the device at a time: missing rows, the batch that they complete, the consumer's and the one before
MODEL_SHARE = 0.2  # of the free memory, left by `auto` for activations and gradients where they were not measured
INDEX_NBYTES = 16  # per row: an int64 for its position in the epoch, and another in its batch if it is not resident

Sets = Sequence[tuple[Data, EpochSampler]]
"""Sets that will be loaded on the same device, each with its sampler."""


@dataclass
class GpuSliceOptions:
    """See `conf/data/loader/gpu_slice.yaml`."""

    resident: int | float | str = or_auto(AUTO, at_least=0, at_most=1)


def resident_fraction(resident: float | str, sets: Sets, device: torch.device, reserve: Memory | None = None) -> float:
    """The fraction of each set that stays on the device; 1 where nothing needs to be copied there.

    Args:
        resident: the option: a fraction, or `auto`.
        reserve: the memory that the model needs, if it was measured.

    Raises:
        DoesNotFitError: a fraction that does not fit.
    """
    copied = [
        (data, sampler)
        for data, sampler in sets
        if isinstance(data, TensorSet) and len(data) and not is_on(device, data)
    ]
    if not backend_of(device).is_async or not copied:
        return 1.0
    free = free_memory_at(device)
    guess = MODEL_SHARE if resident == AUTO else 0.0  # a number is taken as it was typed
    reserved = reserve.at(device) if reserve else int(guess * free)
    nbytes = sum(data.nbytes for data, _ in copied)
    batch = max(data.nbytes // len(data) * min(sampler.batch_size, len(data)) for data, sampler in copied)
    room = free - reserved - INDEX_NBYTES * sum(len(data) for data, _ in copied)
    largest = 1.0 if nbytes <= room else max(room - BATCHES * batch, 0) / nbytes
    if isinstance(resident, str):
        return largest
    if resident > largest:
        model = f", and the model needs {mib(reserved)} too" if reserved else ""
        suggested = math.floor(1000 * largest) / 1000  # rounded down, so that it fits
        raise DoesNotFitError(
            f"data.loader.resident={resident}: takes {mib(int(resident * nbytes))} of memory on {device}, where "
            f"{mib(free)} are free{model}; type data.loader.resident={suggested:g}, the largest that fits, or "
            "data.loader.resident=auto"
        )
    return resident


def with_resident_fraction(
    values: Mapping[str, Any], sets: Sets, device: torch.device, reserve: Memory | None = None
) -> dict[str, Any]:
    """The options of a loader, where `resident` of `gpu_slice` is decided for all sets together.

    Otherwise the first of the loaders that are built for them would leave no room for the others. Raises as
    `resident_fraction`.
    """
    if values["name"] != "gpu_slice":
        return dict(values)
    _, options = LOADERS.member(values)
    return {**values, "resident": resident_fraction(options.resident, sets, device, reserve)}


def needed_memory(fraction: float, tensors: TensorSet, device: torch.device) -> Memory:
    """The resident rows, unless they are on the device already, and the indices of an epoch."""
    rows = 0 if is_on(device, tensors) else int(fraction * tensors.nbytes)
    indices = INDEX_NBYTES * len(tensors) if device.type != "cpu" else 0  # on the CPU every loader has them
    return Memory(device=rows + indices)


def is_on(device: torch.device, tensors: TensorSet) -> bool:
    """Whether a set is in the memory of `device`."""
    found = tensors.images.device
    return found.type == device.type and device.index in (None, found.index) and not tensors.mapped
