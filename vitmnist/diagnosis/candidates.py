"""Other ways to load the batches of a `DataLoader`, timed with its step or, after a script, with an imitated one."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, redirect_stderr, redirect_stdout, suppress
from functools import partial
from hashlib import sha256
from io import StringIO
from math import ceil, inf
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, Subset

from vitmnist.data.randomness import RandomState
from vitmnist.diagnosis.observer import Loop
from vitmnist.errors import ConfigError
from vitmnist.replacement.decoded_dataset import DecodedDataset
from vitmnist.replacement.from_dataloader import from_dataloader
from vitmnist.replacement.original import check_replaceable, rebuild
from vitmnist.replacement.split_transforms import single_transforms, transform_attributes
from vitmnist.runtime.cpu import available_cores
from vitmnist.runtime.memory import Memory, check_fits
from vitmnist.timing.benchmark import Benchmark, Candidate, rows_of
from vitmnist.timing.table import Row

AS_IT_IS = "as it is"
PROFILED_SAMPLES, PROFILED_S = 16, 0.5  # Samples read to see where their time goes, and the seconds that this may take
DECODE_S = 3.0  # Decoding is timed on as many samples as one process reads in this time.
BATCHES, SECONDS = 50, 6.0  # Batches of each candidate that are timed, and about how many seconds this takes for all
NEGLIGIBLE_CORES = 0.1  # A smaller part of a core gets no thread of its own
GAIN = 0.2  # The share of the time that a change must save to be named
LATE_S = 30.0  # Seconds without a batch after which workers count as failed

PLAIN_SAMPLERS = (SequentialSampler, RandomSampler)
Form = Literal["exact", "tensor"]


class FirstSamples(Subset[object]):
    """Some samples of a dataset, with its attributes: a `worker_init_fn` may use them, and `from_dataloader` looks at
    them."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") or name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)


def add_alternatives(benchmark: Benchmark, loader: DataLoader[object], now: Candidate) -> dict[str, float]:
    """Add what else could deliver the batches of a loader: other workers if the step waits, and `from_dataloader`.

    Args:
        now: the loader as it is, with its first block. The others are timed with the same step.

    Returns:
        Where the time of a sample goes, see `time_parts`.
    """
    parts, is_random = time_parts(loader)
    if now.warm_up and now.warm_up.has_noticeable_wait:
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
    changed = limit_waiting(rebuild(loader, num_workers=workers))
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
        # With a sampler or a generator of the script's own, from_dataloader keeps the workers; so does this one.
        is_plain = loader.batch_size and loader.generator is None and type(loader.sampler) in PLAIN_SAMPLERS
        generator = None if is_plain else torch.Generator()
        order = {"batch_size": batch_size, "sampler": None, "shuffle": True, "generator": generator}
        part = rebuild(loader, dataset=FirstSamples(loader.dataset, range(count)), **order)
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


class ImitatedStep:
    """Takes as long as a step of a script, and as much processor time, on as many threads.

    The work is a fixed number of hashes, calibrated while no workers run. So it takes longer where workers use the
    cores, as the step of the script does. For the rest of the time it sleeps.
    """

    def __init__(self, step_s: float, cores: float) -> None:
        self.threads = max(1, ceil(cores - NEGLIGIBLE_CORES))
        busy_share = min(cores / self.threads, 1.0)
        self._pool = ThreadPoolExecutor(self.threads)
        self._block = bytes(2**15)
        self._hashes = 1000
        began = time.thread_time()
        self._compute()
        self._hashes = round(busy_share * step_s * self._hashes / (time.thread_time() - began))
        self._rest_s = (1 - busy_share) * step_s

    def __call__(self, batch: object) -> None:
        others = [self._pool.submit(self._compute) for _ in range(self.threads - 1)]
        self._compute()
        for other in others:
            other.result()
        time.sleep(self._rest_s)

    def _compute(self) -> None:
        for _ in range(self._hashes):
            sha256(self._block)  # Releases the interpreter's lock


def try_loaders(loop: Loop) -> tuple[list[Row], dict[str, float]]:
    """The table of a loop of a script, with an imitated step, and where the time of a sample goes."""
    loader = loop.copy
    if loader is None:
        return [Row(AS_IT_IS, error="this loader cannot be built again")], {}
    step = ImitatedStep(loop.step_s, loop.cores)
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(StringIO()))  # The samples may print.
        stack.enter_context(redirect_stderr(StringIO()))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # For example, torch warns of more workers than cores.
        benchmark = Benchmark(stack)
        now = benchmark.add(AS_IT_IS, lambda: Candidate(limit_waiting(rebuild(loader)), step=step))
        parts = add_alternatives(benchmark, loader, now)
        benchmark.run(BATCHES, SECONDS)
        return rows_of(benchmark.candidates, loop.epoch_length), parts


def best_change(rows: Sequence[Row], repeats: float = inf) -> str | None:
    """The change that saves most of the time of a script, if it saves the share `GAIN` of it.

    Args:
        repeats: how many epochs the script makes, or how many batches if the length of an epoch is unknown.
    """

    def seconds(row: Row) -> float:
        repeated_s = row.epoch_s or row.batch_s
        return repeated_s.median + (row.set_up_s or 0.0) / repeats if repeated_s else inf

    best = min((row for row in rows if row.change), key=seconds, default=None)
    return best.change if best and seconds(best) <= (1 - GAIN) * seconds(rows[0]) < inf else None
