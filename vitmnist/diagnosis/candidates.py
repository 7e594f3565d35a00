"""Other ways to load the batches of a `DataLoader`, and where the time of a sample goes."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from math import ceil
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader, IterableDataset, Subset

from vitmnist.data.randomness import RandomState
from vitmnist.errors import ConfigError
from vitmnist.replacement.decoded_dataset import DecodedDataset
from vitmnist.replacement.from_dataloader import check_replaceable, from_dataloader, rebuilt
from vitmnist.replacement.split_transforms import single_transforms, transform_attributes
from vitmnist.runtime.cpu import available_cores
from vitmnist.runtime.memory import Memory, check_fits
from vitmnist.timing.benchmark import Benchmark, Candidate

AS_IT_IS = "as it is"
PROFILED_SAMPLES, PROFILED_S = 16, 0.5  # Samples read to see where their time goes, and the seconds that this may take
DECODE_S = 3.0  # Decoding is timed on as many samples as one process reads in this time.
LATE_S = 30.0  # Seconds without a batch after which workers count as failed

Form = Literal["exact", "tensor"]


def add_alternatives(benchmark: Benchmark, loader: DataLoader[object], now: Candidate) -> dict[str, float]:
    """Add what else could deliver the batches of a loader: other workers if the step waits, and `from_dataloader`.

    Args:
        now: the loader as it is, with its first block. The others are timed with the same step.

    Returns:
        Where the time of a sample goes, see `time_parts`.
    """
    parts, is_random = time_parts(loader)
    if now.warm_up and now.warm_up.waits:
        # As many workers as make a batch per step, and none.
        work_s = max(now.warm_up.batch_s - now.warm_up.waiting_s, 1e-6)
        enough = ceil(max(loader.num_workers, 1) * now.warm_up.batch_s / work_s)
        for workers in sorted({0, max(2, min(enough, available_cores()))} - {loader.num_workers}):
            benchmark.add(f"num_workers={workers}", partial(_with_workers, loader, now, workers))
    if not isinstance(loader.dataset, DecodedDataset):
        sample_s = sum(parts.values())
        exact = benchmark.add("from_dataloader", partial(_decoded, loader, now, "exact", sample_s))
        if is_random and not exact.error:
            name = 'from_dataloader, transforms="tensor"'
            benchmark.add(name, partial(_decoded, loader, now, "tensor", sample_s))
    return parts


def _with_workers(loader: DataLoader[object], now: Candidate, workers: int) -> Candidate:
    """A loader with another number of workers."""
    context = loader.multiprocessing_context or torch.multiprocessing
    if workers and isinstance(loader.dataset, IterableDataset):
        raise ConfigError("not tried: each worker may deliver all samples of an IterableDataset")
    if workers and not loader.num_workers and context.get_start_method() != "fork":
        raise ConfigError("not tried: workers are not forked, and would import the script again")
    changed = limit_waiting(rebuilt(loader, num_workers=workers))
    return Candidate(changed, now.device, now.step, change=f"DataLoader(…, num_workers={workers})")


def _decoded(loader: DataLoader[object], now: Candidate, form: Form, sample_s: float) -> Candidate:
    """What `from_dataloader` makes of a loader."""
    replaced, set_up_s = decode_part(loader, form, sample_s)
    change = "loader = vitmnist.from_dataloader(loader)" if form == "exact" else None
    return Candidate(limit_waiting(replaced), now.device, now.step, set_up_s=set_up_s, change=change)


def limit_waiting(loader: DataLoader[object]) -> DataLoader[object]:
    """Make workers that deliver no batch an error: those forked after a script lack the threads of its pools."""
    if loader.num_workers:
        loader.timeout = loader.timeout or LATE_S
    return loader


def decode_part(loader: DataLoader[object], form: Form, sample_s: float) -> tuple[DataLoader[object], float]:
    """What `from_dataloader` makes of as many samples as there is time for, and its set-up time for all of them.

    Args:
        sample_s: how many seconds reading a sample takes.

    Raises:
        UserError: `from_dataloader` refuses the loader, or the samples do not fit in memory.
    """
    check_replaceable(loader)
    size = len(loader.dataset)  # type: ignore[arg-type]
    batch_size = loader.batch_size or ceil(size / len(loader))
    count = min(size, max(8 * batch_size, int(DECODE_S / max(sample_s, 1e-6))))
    part = loader
    if count < size:
        samples = Subset(loader.dataset, range(count))
        part = rebuilt(loader, dataset=samples, batch_size=batch_size, sampler=None, shuffle=True)
    began = time.perf_counter()
    replaced = from_dataloader(part, "ram", transforms=form)
    set_up_s = (time.perf_counter() - began) * size / count
    check_fits("ram", Memory(getattr(replaced.dataset, "sample_nbytes", 0) * size), torch.device("cpu"))
    return replaced, set_up_s


def time_parts(loader: DataLoader[object]) -> tuple[dict[str, float], bool]:
    """Seconds per sample of reading, of each transform, and of collating; and whether samples are random."""
    dataset: Any = loader.dataset
    holders = [(owner, name, vars(owner)[name]) for owner, name in transform_attributes(dataset)]
    random_state = RandomState(dataset)
    times: dict[str, float] = {}
    parts: dict[str, float] = {}
    with suppress(Exception):  # If a sample or the collate function fails, the rows of the table say why.
        began = time.perf_counter()
        dataset[0]
        count = min(PROFILED_SAMPLES, len(dataset), max(2, int(PROFILED_S / (time.perf_counter() - began))))
        try:
            for owner, name, transform in holders:
                vars(owner)[name] = _timed(transform, times)
            began = time.perf_counter()
            samples = [dataset[index] for index in range(count)]
            read_s = time.perf_counter() - began - sum(times.values())
        finally:
            for owner, name, transform in holders:
                vars(owner)[name] = transform
        began = time.perf_counter()
        (loader.collate_fn or list)(samples)
        reading = "decoding and reading" if holders else "reading and transforms"
        parts = {reading: read_s, **times, "collating": time.perf_counter() - began}
        parts = {name: seconds / count for name, seconds in parts.items()}
    return parts, bool(random_state.changed())


def _timed(transform: Callable[..., object], times: dict[str, float]) -> Callable[..., object]:
    """A transform that adds the seconds of each of its parts to `times`, by the name of the part."""

    def apply(*inputs: object, **named: object) -> object:
        # A Compose of several arguments, or of named ones, converts them for its parts.
        is_divisible = len(inputs) == 1 and not named
        for part in single_transforms(transform) if is_divisible else [transform]:
            began = time.perf_counter()
            inputs = (part(*inputs, **named),)
            name = getattr(part, "__name__", type(part).__name__)
            times[name] = times.get(name, 0.0) + time.perf_counter() - began
        return inputs[0]

    return apply
