"""Times alternatives to a `DataLoader`, with its own training step or, after a script, with an imitated step."""

import time
import warnings
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from hashlib import sha256
from math import ceil, inf
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader, IterableDataset, Subset, default_collate

from vitmnist.diagnosis.observed_loader import ObservedLoader
from vitmnist.errors import ConfigError
from vitmnist.replacement.decoded_dataset import DecodedDataset
from vitmnist.replacement.from_dataloader import from_dataloader
from vitmnist.replacement.original_dataloader import check_replaceable, rebuild
from vitmnist.replacement.sample_dataset import SampleDataset
from vitmnist.replacement.split_transforms import (
    Transform,
    find_transform_attributes,
    flatten_transforms,
    get_transform_name,
    replace_transforms,
)
from vitmnist.runtime.cpu import available_cores
from vitmnist.timing.benchmark import Benchmark, LoaderCandidate, Measurement, make_timings
from vitmnist.timing.table import NOTICEABLE_SHARE, LoaderTiming

BASELINE = "as it is"
"""The name of the first row, which is the loader in use."""
MAX_DECODING_S = 3.0
"""The time (s) in which a single process reads samples to time `from_dataloader`."""
TIMED_BATCHES = 50
"""The number of batches to time for each candidate."""
MIN_SAVED_SHARE = 0.2
"""A recommended change saves at least this share of a script's time."""
MAX_TIMING_S = 6.0
"""The approximate time limit (s) for timing all candidates."""
WORKER_TIMEOUT_S = 30.0
"""Workers that deliver no batch for this time (s) have failed."""


def add_alternatives(benchmark: Benchmark, loader: DataLoader[object], baseline: Measurement) -> dict[str, float]:
    """Add `from_dataloader` and, if the step waits, other numbers of workers. Returns the result of `time_stages`."""
    seconds_by_stage = time_stages(loader)
    window = baseline.warm_up
    if window and window.later_waiting_s > NOTICEABLE_SHARE * window.later_batch_s:
        # Try no workers, and as many workers as are needed to make a batch per step.
        step_s = max(window.later_batch_s - window.later_waiting_s, 1e-6)
        sufficient = ceil(max(loader.num_workers, 1) * window.later_batch_s / step_s)
        for workers in sorted({0, max(2, min(sufficient, available_cores()))} - {loader.num_workers}):
            benchmark.add(f"num_workers={workers}", partial(_change_workers, loader, baseline.candidate, workers))
    if not isinstance(loader.dataset, DecodedDataset):
        build = partial(build_replacement_candidate, loader, baseline.candidate, sum(seconds_by_stage.values()))
        exact = benchmark.add("from_dataloader", partial(build, "exact"))
        takes_tensors = loader.collate_fn is default_collate
        if takes_tensors and isinstance(getattr(exact.candidate.loader, "dataset", None), SampleDataset):
            benchmark.add('from_dataloader, transforms="tensor"', partial(build, "tensor"))
    return seconds_by_stage


def _change_workers(loader: DataLoader[object], baseline: LoaderCandidate, workers: int) -> LoaderCandidate:
    options: dict[str, object] = {"num_workers": workers}
    if workers and isinstance(loader.dataset, IterableDataset):
        raise ConfigError("not tried: each worker may deliver all samples of an IterableDataset")
    if workers and not loader.num_workers and (method := torch.multiprocessing.get_start_method()) != "fork":
        if method == "spawn":
            raise ConfigError("not tried: workers are not forked, and would import the script again")
        # Workers of a fork server, the default from Python 3.14 on, would import the script again too.
        options["multiprocessing_context"] = "fork"
    change = f"DataLoader(…, {', '.join(f'{name}={value!r}' for name, value in options.items())})"
    return replace(baseline, loader=_set_timeout(rebuild(loader, **options)), change=change)


def build_replacement_candidate(
    loader: DataLoader[object], baseline: LoaderCandidate, sample_s: float, transforms: Literal["exact", "tensor"]
) -> LoaderCandidate:
    """Replace a loader of as many samples as time allows, and estimate the set-up time for all samples."""
    check_replaceable(loader)
    size = len(loader.dataset)  # type: ignore[arg-type]
    batch_size = loader.batch_size or ceil(size / len(loader))
    count = min(size, max(8 * batch_size, int(MAX_DECODING_S / max(sample_s, 1e-6))))
    if count < size:
        part = Subset(loader.dataset, range(count))
        loader = rebuild(loader, dataset=part, batch_size=batch_size, sampler=None, shuffle=True)
    start = time.perf_counter()
    replaced = from_dataloader(loader, "ram", transforms=transforms)
    setup_s = (time.perf_counter() - start) * size / count
    change = "loader = vitmnist.from_dataloader(loader)" if transforms == "exact" else None
    return replace(baseline, loader=_set_timeout(replaced), setup_s=setup_s, change=change)


def _set_timeout(loader: DataLoader[object]) -> DataLoader[object]:
    """Set a timeout for workers. A forked worker lacks the threads of the script's pools, and can wait forever."""
    if loader.num_workers:
        loader.timeout = loader.timeout or WORKER_TIMEOUT_S
    return loader


def time_stages(loader: DataLoader[object]) -> dict[str, float]:
    """Return the seconds per sample of each stage, by name; empty if a sample cannot be read or collated."""
    dataset: Any = loader.dataset
    attributes = list(find_transform_attributes(dataset))
    transforms_s: dict[str, float] = defaultdict(float)
    timed_transforms = [partial(_apply_timed, vars(owner)[name], transforms_s) for owner, name in attributes]
    with suppress(Exception):  # The rows of the table show the error.
        dataset[0]  # Warm up: the first read may open files.
        count = min(8, len(dataset))  # Enough for the shares of the stages
        with replace_transforms(attributes, timed_transforms):
            start = time.perf_counter()
            samples = [dataset[index] for index in range(count)]
            reading_s = time.perf_counter() - start - sum(transforms_s.values())
        start = time.perf_counter()
        (loader.collate_fn or list)(samples)
        collating_s = time.perf_counter() - start
        reading = "decoding and reading" if attributes else "reading and transforms"
        seconds_by_stage = {reading: reading_s, **transforms_s, "collating": collating_s}
        return {name: seconds / count for name, seconds in seconds_by_stage.items()}
    return {}


def _apply_timed(transform: Transform, transforms_s: dict[str, float], /, *args: object, **kwargs: object) -> object:
    """Apply a transform, and add the seconds of each of its parts to `transforms_s`, by name."""
    # A Compose with several arguments or with keyword arguments converts them for its parts.
    is_divisible = len(args) == 1 and not kwargs
    for part in flatten_transforms(transform) if is_divisible else [transform]:
        start = time.perf_counter()
        args = (part(*args, **kwargs),)
        transforms_s[get_transform_name(part)] += time.perf_counter() - start
    return args[0]


class ImitatedStep:
    """A step that takes as much time, processor time and threads as the step of a script.

    It computes a fixed number of hashes, and sleeps for the rest of the time. The number is calibrated while no workers
    run, so the step slows down when workers occupy the cores, as the script's own step does.

    Args:
        step_s: duration of a step of the script in seconds.
        cores: processor time of a step of the script, divided by `step_s`.
    """

    def __init__(self, step_s: float, cores: float) -> None:
        self.threads = max(1, ceil(cores - 0.1))  # A tenth of a core does not need another thread.
        busy_share = min(cores / self.threads, 1.0)
        self._pool = ThreadPoolExecutor(self.threads)
        self._block = bytes(2**15)
        self._hashes = 1000
        start = time.thread_time()
        self._compute()
        self._hashes = round(busy_share * step_s * self._hashes / (time.thread_time() - start))
        self._sleep_s = (1 - busy_share) * step_s

    def __call__(self, batch: object) -> None:
        futures = [self._pool.submit(self._compute) for _ in range(self.threads - 1)]
        self._compute()
        for future in futures:
            future.result()
        time.sleep(self._sleep_s)

    def _compute(self) -> None:
        for _ in range(self._hashes):
            sha256(self._block)  # Hashing releases the GIL.


def time_alternatives(observed_loader: ObservedLoader) -> tuple[list[LoaderTiming], dict[str, float]]:
    """Time a loader and its alternatives with an imitated step. Returns timings and the result of `time_stages`."""
    loader = observed_loader.rebuilt_loader
    if loader is None:
        return [LoaderTiming(BASELINE, error="this loader cannot be built again")], {}
    cores = observed_loader.steps_cpu_s / (sum(observed_loader.steps_s) or inf)
    step = ImitatedStep(observed_loader.step_s, cores)
    benchmark = Benchmark()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # For example, torch warns if there are more workers than cores.
        baseline = benchmark.add(BASELINE, lambda: LoaderCandidate(_set_timeout(rebuild(loader)), step=step))
        seconds_by_stage = add_alternatives(benchmark, loader, baseline)
        benchmark.run(TIMED_BATCHES, MAX_TIMING_S)
    return make_timings(benchmark.measurements, observed_loader.epoch_length), seconds_by_stage


def find_best_change(timings: Sequence[LoaderTiming], epochs: float) -> str | None:
    """Return the change that saves most over `epochs`, including the set-up; None if it saves too little.

    Args:
        timings: the loader in use, followed by its alternatives.
    """
    # The set-up is divided among the epochs.
    means_s = [t.epoch_s.median + (t.setup_s or 0.0) / epochs if t.epoch_s else inf for t in timings]
    changes = [(mean_s, timing.change) for mean_s, timing in zip(means_s, timings, strict=True) if timing.change]
    best_s, change = min(changes, default=(inf, None))
    return change if best_s <= (1 - MIN_SAVED_SHARE) * means_s[0] < inf else None
