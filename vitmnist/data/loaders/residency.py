"""How much of a set `gpu_slice` keeps on the device: a fraction, or what fits next to the model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vitmnist.config.validation import AUTO, or_auto
from vitmnist.data.loaders.base import LOADERS, Data
from vitmnist.data.sampler import EpochSampler
from vitmnist.data.tensors import TensorSet
from vitmnist.runtime.backend import backend_of
from vitmnist.runtime.memory import DoesNotFitError, Memory, free_memory_at, mib

UPLOADED_AHEAD = 2  # batches whose missing rows are on their way to the device while another is consumed
BATCHES = UPLOADED_AHEAD + 3  # on the device at a time: these, the one being merged, the consumer's and the one before
MODEL_SHARE = 0.2  # of the free memory, left by `auto` for activations and gradients where they were not measured

Sets = Sequence[tuple[TensorSet, EpochSampler]]
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
    nbytes = sum(tensors.nbytes for tensors, _ in sets)
    typed = None if isinstance(resident, str) else resident
    if not backend_of(device).is_async or all(not len(one) or is_on(device, one) for one, _ in sets):
        return 1.0
    free = free_memory_at(device)
    guess = MODEL_SHARE if typed is None else 0.0  # a number is taken as it was typed
    reserved = reserve.at(device) if reserve else int(guess * free)
    largest = _largest_fraction(sets, free - reserved)
    if typed is None:
        return largest
    if typed > largest:
        model = f", and the model needs {mib(reserved)} too" if reserved else ""
        suggested = math.floor(1000 * largest) / 1000  # rounded down, so that it fits
        raise DoesNotFitError(
            f"data.loader.resident={resident}: takes {mib(int(typed * nbytes))} of memory on {device}, where "
            f"{mib(free)} are free{model}; type data.loader.resident={suggested:g}, the largest that fits, or "
            "data.loader.resident=auto"
        )
    return typed


def with_resident_fraction(
    values: Mapping[str, Any],
    sets: Sequence[tuple[Data, EpochSampler]],
    device: torch.device,
    reserve: Memory | None = None,
    key: str = "data.loader",
) -> dict[str, Any]:
    """The options of a loader, where `resident` of `gpu_slice`, also as a base, is decided for all sets together.

    Otherwise the first of the loaders that are built for them would leave no room for the others.

    Args:
        reserve: the memory that the model needs, if it was measured.
        key: where `values` stand in the configuration.

    Raises:
        ConfigError: options that do not fit.
        DoesNotFitError: as `resident_fraction`.
    """
    if isinstance(base := values.get("base"), Mapping) and base:
        return {**values, "base": with_resident_fraction(base, sets, device, reserve, f"{key}.base")}
    tensors = [(data, sampler) for data, sampler in sets if isinstance(data, TensorSet)]
    if values["name"] != "gpu_slice" or len(tensors) < len(sets):
        return dict(values)
    _, options = LOADERS.member(values, key)
    return {**values, "resident": resident_fraction(options.resident, tensors, device, reserve)}


def needed_memory(fraction: float, tensors: TensorSet, sampler: EpochSampler, device: torch.device) -> Memory:
    """The resident rows, unless they are on the device already, and the indices of an epoch."""
    rows = 0 if is_on(device, tensors) else int(fraction * tensors.nbytes)
    indices = _index_nbytes(fraction, sampler) if device.type != "cpu" else 0  # on the CPU every loader has them
    return Memory(device=rows + indices)


def is_on(device: torch.device, tensors: TensorSet) -> bool:
    """Whether a set is in the memory of `device`."""
    found = tensors.images.device
    return found.type == device.type and device.index in (None, found.index) and not tensors.mapped


def _largest_fraction(sets: Sets, room: int) -> float:
    """The largest fraction of all sets that takes at most `room` bytes, with the indices and a few batches."""
    nbytes = sum(tensors.nbytes for tensors, _ in sets)
    if nbytes + sum(_index_nbytes(1.0, sampler) for _, sampler in sets) <= room:
        return 1.0
    room -= sum(_index_nbytes(0.0, sampler) for _, sampler in sets)
    room -= BATCHES * max(
        tensors.nbytes // len(tensors) * min(sampler.batch_size, len(tensors))
        for tensors, sampler in sets
        if len(tensors)
    )
    return max(room, 0) / nbytes


def _index_nbytes(fraction: float, sampler: EpochSampler) -> int:
    """An int64 for each row of an epoch, and another for the position in its batch of each row that is missing."""
    return 8 * sampler.size + 8 * math.ceil((1 - fraction) * sampler.size)
