"""Other ways to load the batches of a `DataLoader`, timed with its step or, after a script, with an imitated one."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from functools import partial
from io import StringIO
from math import ceil, inf
from typing import Literal

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, Subset

from vitmnist.diagnosis.imitated_step import ImitatedStep
from vitmnist.diagnosis.loop import Loop
from vitmnist.diagnosis.sample_parts import time_parts
from vitmnist.errors import ConfigError
from vitmnist.replacement.decoded_dataset import DecodedDataset, TransformedDataset
from vitmnist.replacement.from_dataloader import from_dataloader
from vitmnist.replacement.original import check_replaceable, rebuild
from vitmnist.runtime.cpu import available_cores
from vitmnist.runtime.memory import Memory, check_fits
from vitmnist.timing.benchmark import Benchmark, Candidate, rows_of
from vitmnist.timing.table import Row

BASELINE = "as it is"
"""Name of the row of the loader that is diagnosed."""
DECODING_S = 3.0
"""Decoding is timed on as many samples as one process reads in this time."""
TIMED_BATCHES, TIMED_S = 50, 6.0
"""Batches of each candidate that are timed, and about how many seconds this takes for all of them."""
MIN_SAVING = 0.2
"""Share of the time of a script that a change must save to be named."""
WORKER_TIMEOUT_S = 30.0
"""Seconds without a batch after which workers count as failed."""

Transforms = Literal["exact", "tensor"]


class FirstSamples(Subset[object]):
    """The first samples of a dataset, with its attributes, which `from_dataloader` and a `worker_init_fn` read."""

    def __init__(self, dataset: torch.utils.data.Dataset[object], count: int) -> None:
        super().__init__(dataset, range(count))

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") or name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)


def add_alternatives(benchmark: Benchmark, loader: DataLoader[object], baseline: Candidate) -> dict[str, float]:
    """Add the alternatives to a loader: other numbers of workers if the step waits, and `from_dataloader`.

    Args:
        baseline: the loader as it is, with its first block. The others are timed with the same step.

    Returns:
        Where the time of a sample goes, see `time_parts`.
    """
    parts = time_parts(loader)
    block = baseline.warm_up
    if block and block.waits:
        # As many workers as make a batch per step, and none.
        step_s = max(block.batch_s - block.waiting_s, 1e-6)
        enough = ceil(max(loader.num_workers, 1) * block.batch_s / step_s)
        for workers in sorted({0, max(2, min(enough, available_cores()))} - {loader.num_workers}):
            benchmark.add(f"num_workers={workers}", partial(_with_workers, loader, baseline, workers))
    if not isinstance(loader.dataset, DecodedDataset):
        sample_s = sum(parts.values())
        exact = benchmark.add("from_dataloader", partial(_decoded, loader, baseline, "exact", sample_s))
        if isinstance(getattr(exact.loader, "dataset", None), TransformedDataset):
            name = 'from_dataloader, transforms="tensor"'
            benchmark.add(name, partial(_decoded, loader, baseline, "tensor", sample_s))
    return parts


def _with_workers(loader: DataLoader[object], baseline: Candidate, workers: int) -> Candidate:
    """A loader with another number of workers."""
    context = loader.multiprocessing_context or torch.multiprocessing
    if workers and isinstance(loader.dataset, IterableDataset):
        raise ConfigError("not tried: each worker may deliver all samples of an IterableDataset")
    if workers and not loader.num_workers and context.get_start_method() != "fork":
        raise ConfigError("not tried: workers are not forked, and would import the script again")
    changed = _with_timeout(rebuild(loader, num_workers=workers))
    return Candidate(changed, baseline.device, baseline.step, change=f"DataLoader(…, num_workers={workers})")


def _decoded(loader: DataLoader[object], baseline: Candidate, transforms: Transforms, sample_s: float) -> Candidate:
    """The replacement that `from_dataloader` builds for a loader."""
    replaced, set_up_s = decode_first_samples(loader, transforms, sample_s)
    change = "loader = vitmnist.from_dataloader(loader)" if transforms == "exact" else None
    return Candidate(_with_timeout(replaced), baseline.device, baseline.step, set_up_s=set_up_s, change=change)


def _with_timeout(loader: DataLoader[object]) -> DataLoader[object]:
    """Make workers that deliver no batch an error: those forked after a script lack the threads of its pools."""
    if loader.num_workers:
        loader.timeout = loader.timeout or WORKER_TIMEOUT_S
    return loader


def decode_first_samples(
    loader: DataLoader[object], transforms: Transforms, sample_s: float
) -> tuple[DataLoader[object], float]:
    """The replacement of a loader for as many samples as there is time for, and its set-up time for all samples.

    Args:
        sample_s: how many seconds reading a sample takes.

    Raises:
        UserError: `from_dataloader` refuses the loader, or the samples do not fit in memory.
    """
    check_replaceable(loader)
    size = len(loader.dataset)  # type: ignore[arg-type]
    batch_size = loader.batch_size or ceil(size / len(loader))
    count = min(size, max(8 * batch_size, int(DECODING_S / max(sample_s, 1e-6))))
    if count < size:
        # With a custom sampler or generator, from_dataloader keeps the workers, so it must do so here too.
        has_own_order = loader.generator is not None or type(loader.sampler) not in (SequentialSampler, RandomSampler)
        generator = torch.Generator() if has_own_order or not loader.batch_size else None
        order = {"batch_size": batch_size, "sampler": None, "shuffle": True, "generator": generator}
        loader = rebuild(loader, dataset=FirstSamples(loader.dataset, count), **order)
    start = time.perf_counter()
    replaced = from_dataloader(loader, "ram", transforms=transforms)
    set_up_s = (time.perf_counter() - start) * size / count
    check_fits("ram", Memory(getattr(replaced.dataset, "sample_nbytes", 0) * size), torch.device("cpu"))
    return replaced, set_up_s


def try_loaders(loop: Loop) -> tuple[list[Row], dict[str, float]]:
    """The table of a loop of a script, with an imitated step, and where the time of a sample goes."""
    loader = loop.plain_copy
    if loader is None:
        return [Row(BASELINE, error="this loader cannot be built again")], {}
    step = ImitatedStep(loop.step_s, loop.cores)
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(StringIO()))  # The samples may print.
        stack.enter_context(redirect_stderr(StringIO()))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # For example, torch warns of more workers than cores.
        benchmark = Benchmark(stack)
        baseline = benchmark.add(BASELINE, lambda: Candidate(_with_timeout(rebuild(loader)), step=step))
        parts = add_alternatives(benchmark, loader, baseline)
        benchmark.run(TIMED_BATCHES, TIMED_S)
        return rows_of(benchmark.candidates, loop.epoch_length), parts


def best_change(rows: Sequence[Row], repeats: float = inf) -> str | None:
    """The change that saves most of the time of a script, if it saves the share `MIN_SAVING` of it.

    Args:
        repeats: how many epochs the script makes, or how many batches if the length of an epoch is unknown.
    """

    def seconds(row: Row) -> float:
        repeated_s = row.epoch_s or row.batch_s
        return repeated_s.median + (row.set_up_s or 0.0) / repeats if repeated_s else inf

    best = min((row for row in rows if row.change), key=seconds, default=None)
    return best.change if best and seconds(best) <= (1 - MIN_SAVING) * seconds(rows[0]) < inf else None
