"""Other ways to load the batches of a `DataLoader`: its own with other workers, and decoded once."""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, redirect_stderr, redirect_stdout, suppress
from hashlib import sha256
from io import StringIO
from math import ceil, inf
from statistics import median
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, Subset

from vitmnist.diagnosis.observation import Loop, copy_of
from vitmnist.errors import ConfigError
from vitmnist.replacement.decoded_dataset import DecodedDataset
from vitmnist.replacement.from_dataloader import from_dataloader
from vitmnist.runtime.cpu import available_cores
from vitmnist.runtime.memory import DoesNotFitError, Memory, check_fits
from vitmnist.timing.benchmark import Benchmark, Candidate, rows_of
from vitmnist.timing.table import Row

AS_IT_IS = "as it is"
ASKED = 16  # Samples that are read to see where their time goes; fewer of slow ones
ASKED_S = 0.5
DECODE_S = 2.0  # Decoding is timed on as many samples as one process reads in this time
TRY_BATCHES, TRY_S = 50, 6.0  # To time the candidates after a script
LATE_S = 30.0  # Without a batch, after which workers are said to fail
GAIN = 0.2  # A change must save this share of the time to be named

AsCandidate = Callable[[DataLoader[Any]], Candidate]


class ImitatedStep:
    """Takes as long as a step of a script, and as much processor time, on as many threads.

    The work is a fixed number of hashes, found without workers, so it takes longer where these use the cores. For the
    rest of the time it sleeps.
    """

    def __init__(self, step_s: float, cores: float) -> None:
        threads = max(1, round(cores))
        self._work = bytes(2**15)  # hashlib releases the interpreter's lock
        self._pool = ThreadPoolExecutor(threads - 1) if threads > 1 else None
        self._others = range(threads - 1)
        self._hashes, self._rest_s = 1000, 0.0
        each_s = min(self._seconds() for _ in range(3)) / self._hashes
        self._hashes = round(min(cores / threads, 1.0) * step_s / each_s)
        self._rest_s = max(0.0, step_s - median(self._seconds() for _ in range(3)))

    def __call__(self, batch: object) -> None:
        others = [self._pool.submit(self._compute) for _ in self._others] if self._pool else []
        self._compute()
        for other in others:
            other.result()
        if self._rest_s > 0:
            time.sleep(self._rest_s)

    def _compute(self) -> None:
        for _ in range(self._hashes):
            sha256(self._work)

    def _seconds(self) -> float:
        began = time.perf_counter()
        self(None)
        return time.perf_counter() - began


class Part(Subset[Any]):
    """Some samples of a dataset, with its attributes, by which `from_dataloader` may refuse it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)


def add_candidates(
    benchmark: Benchmark, loader: DataLoader[Any], now: Candidate, as_candidate: AsCandidate, kind: type
) -> None:
    """Add what else could deliver the batches of a loader; a row says why it cannot be timed.

    Args:
        now: the loader as it is, with its first block.
        as_candidate: times a `DataLoader` with the same step.
        kind: the class of the script's loader.
    """
    for number in _worker_counts(loader, now):

        def with_workers(stack: ExitStack, number: int = number) -> Candidate:
            _check_workers(loader, number)
            candidate = as_candidate(copy_of(loader, num_workers=number))
            candidate.change = f"DataLoader(…, num_workers={number})"
            return candidate

        benchmark.add(f"num_workers={number}", with_workers)
    if isinstance(loader.dataset, DecodedDataset):
        return
    forms: list[Literal["exact", "tensor"]] = ["exact", "tensor"] if draws(loader) else ["exact"]
    for form in forms:

        def decoded(stack: ExitStack, form: Literal["exact", "tensor"] = form) -> Candidate:
            if any("__iter__" in vars(base) for base in kind.__mro__[: kind.__mro__.index(DataLoader)]):
                raise ConfigError(f"{kind.__name__} iterates in its own way; give the plain DataLoader that it wraps")
            replaced, set_up_s = decode_part(loader, form)
            candidate = as_candidate(replaced)
            candidate.set_up_s = set_up_s
            candidate.change = "loader = vitmnist.from_dataloader(loader)" if form == "exact" else None
            return candidate

        benchmark.add("from_dataloader" + (', transforms="tensor"' if form == "tensor" else ""), decoded)


def _worker_counts(loader: DataLoader[Any], now: Candidate) -> list[int]:
    """As many workers as make a batch per step, up to the number of cores, and none; if the step waits."""
    if not now.warm_up or not now.warm_up.waits:
        return []
    work_s = now.warm_up.batch_s - now.warm_up.waiting_s
    enough = ceil(max(loader.num_workers, 1) * now.warm_up.batch_s / max(work_s, 1e-6))
    return sorted({0, max(2, min(enough, available_cores()))} - {loader.num_workers})


def _check_workers(loader: DataLoader[Any], number: int) -> None:
    """Raise `ConfigError` where another number of workers is not tried."""
    if number and isinstance(loader.dataset, IterableDataset):
        raise ConfigError("not tried: each worker may deliver all samples of an IterableDataset")
    context = loader.multiprocessing_context or torch.multiprocessing
    if number and not loader.num_workers and context.get_start_method() != "fork":
        raise ConfigError("not tried: workers are not forked, and would import the script again")


def draws(loader: DataLoader[Any]) -> bool:
    """Whether reading samples draws random numbers of torch or Python, as random transforms do."""
    before = torch.get_rng_state(), random.getstate()
    with suppress(Exception):  # the rows say why samples cannot be read
        for index in range(min(ASKED, len(loader.dataset))):  # type: ignore[arg-type]
            loader.dataset[index]
    return not torch.equal(before[0], torch.get_rng_state()) or before[1] != random.getstate()


def decode_part(loader: DataLoader[Any], form: Literal["exact", "tensor"]) -> tuple[DataLoader[Any], float]:
    """What `from_dataloader` makes of the samples that there is time for, and its seconds for all samples.

    Raises:
        UserError: it refuses the loader, or its samples fit nowhere.
    """
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDataset) or loader.batch_sampler is None or not len(dataset):
        from_dataloader(loader, "ram")  # raises
    size, batch_size = len(dataset), loader.batch_size or ceil(len(dataset) / len(loader))
    began = time.perf_counter()
    dataset[0]
    count = min(size, max(8 * batch_size, int(DECODE_S / max(time.perf_counter() - began, 1e-6))))
    few = count // 4
    few_s = _decoded(loader, range(few), form)[1] if count < size else 0.0
    replaced, seconds = _decoded(loader, range(count), form)
    # Checks read some samples again, so the time of a part is no multiple; the bounds are for noise.
    each_s = min(max((seconds - few_s) / (count - few), seconds / count / 2), seconds / count)
    return replaced, seconds + (size - count) * each_s


def _decoded(
    loader: DataLoader[Any], indices: Sequence[int], form: Literal["exact", "tensor"]
) -> tuple[DataLoader[Any], float]:
    dataset: Any = loader.dataset
    part, sampler = loader, loader.sampler
    if len(indices) < len(dataset):
        batch_size = loader.batch_size or ceil(len(dataset) / len(loader))
        # A sampler of the script's own, and a generator, keep the workers.
        is_plain = loader.batch_size and type(sampler) in (SequentialSampler, RandomSampler)
        generator = None if is_plain and loader.generator is None else torch.Generator()
        changed = {"batch_size": batch_size, "sampler": None, "shuffle": True, "batch_sampler": None}
        part = copy_of(loader, dataset=Part(dataset, indices), generator=generator, **changed)
    began = time.perf_counter()
    replaced = from_dataloader(part, "ram", transforms=form)
    seconds = time.perf_counter() - began
    try:
        needed = int(getattr(replaced.dataset, "sample_nbytes", 0) * len(dataset))
        check_fits("ram", Memory(host=needed), torch.device("cpu"))
    except DoesNotFitError:  # a file may have room
        replaced = from_dataloader(part, "cache", transforms=form)
    return replaced, seconds


def try_loaders(loop: Loop) -> tuple[list[Row], dict[str, float]]:
    """The table of a loop of a script, with an imitated step, and where the time of a sample goes."""
    loader = loop.copy
    if loader is None:
        return [Row(AS_IT_IS, error=f"a {loop.kind.__name__} cannot be built again")], {}
    length: float = loop.batches / len(loop.passes)
    with suppress(TypeError):
        length = len(loader)
    step = ImitatedStep(loop.step_s, loop.cores)

    def as_candidate(loader: DataLoader[Any]) -> Candidate:
        if loader.num_workers:  # forked ones lack the threads of a pool of the script
            loader.timeout = loader.timeout or LATE_S
        return Candidate("", loader, step=step)

    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # such as torch's of more workers than cores
        for redirect in (redirect_stdout, redirect_stderr):  # the samples may print
            stack.enter_context(redirect(StringIO()))
        parts = time_parts(loader)
        benchmark = Benchmark(stack)
        now = benchmark.add(AS_IT_IS, lambda _: as_candidate(copy_of(loader)))
        add_candidates(benchmark, loader, now, as_candidate, loop.kind)
        benchmark.run(TRY_BATCHES, TRY_S)
        return rows_of(benchmark.candidates, length), parts


def best_change(rows: Sequence[Row], epochs: float = inf) -> str | None:
    """The change that saves most of the time of so many epochs, if it is noticeable."""

    def seconds(row: Row) -> float:
        return row.epoch_s.median + (row.set_up_s or 0.0) / epochs if row.epoch_s else inf

    best = min((row for row in rows if row.change), key=seconds, default=None)
    return best.change if best and seconds(best) <= (1 - GAIN) * seconds(rows[0]) < inf else None


class TimedTransform:
    """A transform that adds up its seconds, with the other attributes of the original."""

    def __init__(self, original: Any, times: dict[str, float]) -> None:
        self._original, self._times = original, times

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        began = time.perf_counter()
        result = self._original(*inputs, **named)
        name = getattr(self._original, "__name__", type(self._original).__name__)
        self._times[name] = self._times.get(name, 0.0) + time.perf_counter() - began
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def time_parts(loader: DataLoader[Any]) -> dict[str, float]:
    """Seconds per sample of reading, of each transform by its class, and of collating; empty if that fails."""
    dataset, times = loader.dataset, dict[str, float]()
    replaced: list[tuple[Any, str, Any]] = []
    try:
        began = time.perf_counter()
        dataset[0]
        count = min(ASKED, len(dataset), max(2, int(ASKED_S / (time.perf_counter() - began))))  # type: ignore[arg-type]
        for owner, name in list(transform_attributes(dataset)):
            value = vars(owner)[name]
            replaced.append((owner, name, value))
            timed = [TimedTransform(one, times) for one in value] if isinstance(value, list) else None
            setattr(owner, name, timed or TimedTransform(value, times))
        began = time.perf_counter()
        samples = [dataset[index] for index in range(count)]
        read_s = time.perf_counter() - began - sum(times.values())
        began = time.perf_counter()
        if loader.collate_fn:
            loader.collate_fn(samples)
        whole = "decoding and reading" if replaced else "reading and transforms"
        times = {whole: read_s, **times, "collating": time.perf_counter() - began}
        return {name: seconds / count for name, seconds in times.items()}
    except Exception:  # samples and collate function may fail in any way; the rows say so
        return {}
    finally:
        for owner, name, value in replaced:
            setattr(owner, name, value)


def transform_attributes(dataset: Any) -> Iterator[tuple[Any, str]]:
    """The transforms of a dataset, or of those it is made of: objects and the names of their attributes.

    A list is that of a `Compose`; other values are single transforms.
    """
    for name in ("transform", "transforms"):
        transform = getattr(dataset, "__dict__", {}).get(name)
        if hasattr(transform, "target_transform"):  # torchvision's pair, for an image and its target
            continue
        if isinstance(getattr(transform, "transforms", None), list):
            yield transform, "transforms"
        elif callable(transform):
            yield dataset, name
    for part in [getattr(dataset, "__dict__", {}).get("dataset"), *getattr(dataset, "datasets", ())]:
        if part is not None:
            yield from transform_attributes(part)
