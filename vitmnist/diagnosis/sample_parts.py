"""Where the time of a sample goes: reading, each transform, collating."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch.utils.data import DataLoader

from vitmnist.replacement.split_transforms import single_transforms, transform_attributes

PROFILED_SAMPLES, PROFILED_S = 16, 0.5
"""Number of samples that are read, and about how many seconds this may take."""


def time_parts(loader: DataLoader[object]) -> dict[str, float]:
    """Seconds per sample of each part, by name; empty if a sample cannot be read or collated."""
    dataset: Any = loader.dataset
    transforms = [(owner, name, vars(owner)[name]) for owner, name in transform_attributes(dataset)]
    transforms_s: dict[str, float] = {}
    with suppress(Exception):  # The rows of the table say why.
        start = time.perf_counter()
        dataset[0]
        count = min(PROFILED_SAMPLES, len(dataset), max(2, int(PROFILED_S / (time.perf_counter() - start))))
        try:
            for owner, name, transform in transforms:
                vars(owner)[name] = _timed(transform, transforms_s)
            start = time.perf_counter()
            samples = [dataset[index] for index in range(count)]
            reading_s = time.perf_counter() - start - sum(transforms_s.values())
        finally:
            for owner, name, transform in transforms:
                vars(owner)[name] = transform
        start = time.perf_counter()
        (loader.collate_fn or list)(samples)
        collating_s = time.perf_counter() - start
        reading = "decoding and reading" if transforms else "reading and transforms"
        parts = {reading: reading_s, **transforms_s, "collating": collating_s}
        return {name: seconds / count for name, seconds in parts.items()}
    return {}


def _timed(transform: Callable[..., object], transforms_s: dict[str, float]) -> Callable[..., object]:
    """A transform that adds the seconds of each of its parts to `transforms_s`, by the name of the part."""

    def apply(*args: object, **kwargs: object) -> object:
        # A Compose of several arguments, or of keyword arguments, converts them for its parts.
        is_divisible = len(args) == 1 and not kwargs
        for part in single_transforms(transform) if is_divisible else [transform]:
            start = time.perf_counter()
            args = (part(*args, **kwargs),)
            name = getattr(part, "__name__", type(part).__name__)
            transforms_s[name] = transforms_s.get(name, 0.0) + time.perf_counter() - start
        return args[0]

    return apply
