"""Checks a data loader for silent faults, such as repeated samples, and reports them or raises errors in a test."""

import gc
import multiprocessing
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field
from inspect import signature
from itertools import islice, zip_longest
from multiprocessing.process import BaseProcess
from typing import Any, Literal, NamedTuple, SupportsIndex
from unittest import SkipTest

import numpy as np
import torch

from vitmnist.data.sampler import EpochSampler
from vitmnist.errors import DataError, UserError, first_line
from vitmnist.runtime.random_state import GLOBAL_GENERATORS, preserve_random_state, seed_generators
from vitmnist.store.tree import flatten_tree

GRACE_S = 5.0
"""The time (s) in which threads and processes must end. On a busy machine, most need a second."""


class ProbeBatch(NamedTuple):
    """Copies of the indices `[B]` and the values `[B, 3]` of a batch. A loader may deliver no values."""

    indices: np.ndarray[Any, Any]
    values: Any


class CheckResult(NamedTuple):
    """A line of the report. `detail` is the extent of the check, the first fault, or why nothing was checked."""

    name: str
    status: Literal["ok", "FAILED", "not checked"]
    detail: str


class AuditReport(NamedTuple):
    """The results of `audit`. Its string is the printed report."""

    results: tuple[CheckResult, ...]

    @property
    def ok(self) -> bool:
        """Whether no check failed. A property that was not checked did not fail."""
        return all(result.status != "FAILED" for result in self.results)

    def __str__(self) -> str:
        return "\n".join(f"{status:<11}  {name}: {detail}" for name, status, detail in self.results)


class AuditDataset(torch.utils.data.Dataset[tuple[int, Any]]):
    """Sample i is `(i, values)`. The values, float64 `[3]`, are drawn from the global generators, or are all i."""

    def __init__(self, size: int, is_random: bool = True) -> None:
        self.size, self.is_random = size, is_random

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: SupportsIndex) -> tuple[int, Any]:
        sample = range(self.size)[index]  # An index out of range raises IndexError.
        if not self.is_random:
            return sample, np.full(len(GLOBAL_GENERATORS), float(sample))
        return sample, np.array([torch.rand((), dtype=torch.float64).item(), np.random.rand(), random.random()])


def audit(loader_factory: Callable[..., Any], *, samples: int = 1009, strict: bool = False) -> AuditReport:
    """Check a loader for repeated and missing samples, shared random numbers and leaks; print a line for each check.

    Args:
        loader_factory: `loader_factory(dataset)` returns a new loader over a dataset whose sample i is `(i, values)`,
            with random values `[3]`. `num_workers` and `seed` are passed too if it takes them. The loader has
            `epoch(number, start)`, or its n-th `iter` delivers epoch n. The audit calls `set_epoch` if it exists.
        samples: size of the dataset, at least 16. A full check needs four batches, of which the last is shorter.
        strict: raise `AssertionError` at the first check that fails. The message begins with its name.
    """
    settings = {"num_workers": 2, "seed": 0}
    accepted = {name: settings[name] for name in settings.keys() & signature(loader_factory).parameters}
    loader = _AuditedLoader(loader_factory, AuditDataset(samples), accepted)
    checks = {
        "an epoch has every index once": loader.check_indices,
        "epochs have different orders": loader.check_orders,
        "batches depend on the seed and the epoch alone": loader.check_workers,
        "a resumed epoch neither skips nor repeats": loader.check_resuming,
        "samples do not share random numbers": loader.check_random_numbers,
        "an abandoned epoch and a closed loader leave nothing running": loader.check_leftovers,
    }
    results: list[CheckResult] = []
    with preserve_random_state():
        for name, check in checks.items():
            try:
                result = CheckResult(name, "ok", check())
            except SkipTest as reason:
                result = CheckResult(name, "not checked", str(reason))
            except Exception as error:  # A loader can fail in any way.
                detail = f"{type(error).__name__}: ".removeprefix("AssertionError: ") + first_line(error)
                if strict:
                    raise AssertionError(f"{name}: {detail}") from error
                result = CheckResult(name, "FAILED", detail)
            print(AuditReport((result,)), flush=True)  # Some loaders take seconds to start.
            results.append(result)
            if not loader.epochs:  # Without batches, nothing else can be checked.
                break
    return AuditReport(tuple(results))


@dataclass
class _AuditedLoader:
    """Reads and checks a loader. Each check returns its extent, or raises `AssertionError` or `SkipTest`."""

    build: Callable[..., Any]
    data: AuditDataset
    settings: dict[str, int]
    epochs: list[list[ProbeBatch]] = field(default_factory=list)
    """Epochs 0 and 1 with the default settings. The first check reads them; they stay empty if it cannot."""
    labels: torch.Tensor | None = None
    """The label of each sample if the loader balances classes; None if it delivers each index once."""

    def open(self, **settings: int) -> AbstractContextManager[Any]:
        seed_generators(0, 0, 0)  # Training scripts seed the generators before they build a loader.
        loader = self.build(self.data, **{**self.settings, **settings})
        return closing(loader) if hasattr(loader, "close") else nullcontext(loader)

    def read(self, **settings: int) -> list[list[ProbeBatch]]:
        """Read epochs 0 and 1 of a new loader. Raises `DataError` if an epoch is empty or endless."""
        size = self.data.size
        with self.open(**settings) as loader:
            sampler = getattr(loader, "sampler", None)
            self.labels = sampler.labels if isinstance(sampler, EpochSampler) else None
            epochs = [[_copy(batch) for batch in islice(_start(loader, epoch), size + 1)] for epoch in (0, 1)]
        for epoch, batches in enumerate(epochs):
            if not 0 < len(batches) <= size:
                raise DataError(f"epoch {epoch} has {len(batches) or 'no'} batches of {size} samples, or more")
        return epochs

    def check_indices(self) -> str:
        """Check that no index comes twice, and that indices are missing only if a short last batch is dropped."""
        try:
            self.epochs = self.read()
        except UserError:  # The loader refuses random samples.
            self.data = AuditDataset(self.data.size, is_random=False)
            self.epochs = self.read()
        orders = [_order(epoch) for epoch in self.epochs]
        missing = [sorted(set(range(self.data.size)) - set(order)) for order in orders]
        batch_sizes = {len(batch.indices) for batch in self.epochs[0]}
        can_drop = batch_sizes.pop() - 1 if len(batch_sizes) == 1 else 0
        if self.labels is not None:
            return self._check_balance(orders, self.labels, can_drop)
        for epoch, order in enumerate(orders):
            if repeated := [index for index, count in Counter(order).items() if count > 1]:
                raise AssertionError(f"epoch {epoch}: index {repeated[0]} came twice; such indices: {len(repeated)}")
            if (count := len(missing[epoch])) > can_drop:
                raise AssertionError(f"epoch {epoch}: {count} indices never came, such as {missing[epoch][0]}")
        if missing[0] and missing[0] == missing[1] and orders[0] != orders[1]:
            raise AssertionError(f"index {missing[0][0]} never came in epochs 0 and 1, whose orders differ")
        return f"{self.data.size} samples, {len(self.epochs[0])} batches, {len(missing[0])} samples dropped"

    def _check_balance(self, orders: list[list[int]], labels: torch.Tensor, can_drop: int) -> str:
        """Check that classes came equally often; `shuffle="balanced"` repeats samples."""
        for epoch, order in enumerate(orders):
            totals = (labels[order] == labels.unique()[:, None]).sum(dim=1)
            dropped = self.data.size - len(order)
            if not 0 <= dropped <= can_drop or totals.max() - totals.min() > 1 + dropped:
                raise AssertionError(
                    f"epoch {epoch}: {len(order)} samples, from {min(totals)} to {max(totals)} of a class"
                )
        return f"balanced: {self.data.size} samples of {len(totals)} classes, {dropped} samples dropped"

    def check_orders(self) -> str:
        first, second = map(_order, self.epochs)
        if first == second:
            raise AssertionError(f"epochs 0 and 1 have the same order: {', '.join(map(str, first[:5]))}, …")
        return "epochs 0 and 1"

    def check_workers(self) -> str:
        builds: dict[str, dict[str, int]] = {"built twice": {}}
        if "num_workers" in self.settings:
            builds["0 and 2 workers"] = {"num_workers": 0}
        for name, settings in builds.items():
            for index, epoch in enumerate(self.read(**settings)):
                _compare(self.epochs[index], epoch, f"{name}: epoch {index}")
        return f"{', '.join(builds)}; 2 epochs"

    def check_resuming(self) -> str:
        start = len(self.epochs[1]) // 2
        with self.open() as loader:
            if not hasattr(loader, "epoch"):
                raise SkipTest("the loader has no epoch(number, start)")
            rest = [_copy(batch) for batch in loader.epoch(1, start)]
        _compare(self.epochs[1][start:], rest, f"epoch(1, {start})", start)
        return f"epoch(1, {start}) of {len(self.epochs[1])} batches"

    def check_random_numbers(self) -> str:
        values = [batch.values for epoch in self.epochs for batch in epoch if batch.values is not None]
        if not values or not self.data.is_random:
            raise SkipTest("the loader does not take random samples, or leaves out their values")
        for name, numbers in zip(GLOBAL_GENERATORS, np.concatenate(values).T, strict=True):
            if repeated := len(numbers) - len(np.unique(numbers)):
                raise AssertionError(f"{name}: {repeated} of {len(numbers)} samples share their number with another")
        return f"{', '.join(GLOBAL_GENERATORS)}; 2 epochs"

    def check_leftovers(self) -> str:
        before = find_running()
        with self.open() as loader:
            next(_start(loader, 0), None)
        del loader  # The threads and processes of a loader without `close` end with its last reference.
        if leftovers := find_leftovers(before):
            raise AssertionError(f"left: {', '.join(leftovers)}")
        return "no thread and no process"


def _order(batches: list[ProbeBatch]) -> list[int]:
    return [index for batch in batches for index in batch.indices.tolist()]


def _start(loader: Iterable[object], epoch: int) -> Iterator[object]:
    if hasattr(loader, "epoch"):
        return iter(loader.epoch(epoch))
    for part in (loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)):
        if set_epoch := getattr(part, "set_epoch", None):
            set_epoch(epoch)
    return iter(loader)


def _copy(batch: object) -> ProbeBatch:
    """Copy the indices and values of a batch of any structure, because the loader can reuse its memory."""
    arrays = [np.array(leaf.tolist() if torch.is_tensor(leaf) else leaf, ndmin=1) for leaf in flatten_tree(batch)[0]]
    if not arrays or not np.issubdtype(arrays[0].dtype, np.integer):
        raise DataError("the first value of a batch must be the indices of its samples; deliver samples as they are")
    return ProbeBatch(arrays[0], arrays[1] if len(arrays) > 1 else None)


def _compare(expected: list[ProbeBatch], actual: list[ProbeBatch], context: str, start: int = 0) -> None:
    pairs = zip_longest(expected, actual, fillvalue=ProbeBatch(np.array([]), None))
    for index, (batch, other) in enumerate(pairs, start):
        samples, other_samples = batch.indices[:3].tolist(), other.indices[:3].tolist()
        if not np.array_equal(batch.indices, other.indices):
            raise AssertionError(f"{context}, batch {index}: expected samples {samples}…, found {other_samples}…")
        if batch.values is not None and not np.array_equal(batch.values, other.values):
            raise AssertionError(f"{context}, batch {index}: the samples {samples}… have other values")


def find_running() -> set[threading.Thread | BaseProcess]:
    """Return the threads of this process and the processes that it started with `multiprocessing`."""
    return {*threading.enumerate(), *multiprocessing.active_children()}


def find_leftovers(before: set[threading.Thread | BaseProcess]) -> list[str]:
    """Return the names of threads and processes that started after `before` and do not end within `GRACE_S`."""
    deadline = time.monotonic() + GRACE_S
    while (leftovers := find_running() - before) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    return sorted(f"{'thread' if isinstance(item, threading.Thread) else 'process'} {item.name}" for item in leftovers)
