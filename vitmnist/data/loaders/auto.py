"""Measures instead of guessing: each loader that fits is timed for a few batches, and the fastest is built.

All loaders deliver the same batches, so the choice changes nothing but the time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from tabulate import tabulate
from tqdm import tqdm

from vitmnist.config.validation import bounded, join
from vitmnist.data.loaders.base import LOADERS, Data, Loader, needs_of
from vitmnist.data.loaders.pinned import HostLoader
from vitmnist.data.loaders.residency import with_resident_fraction
from vitmnist.data.loaders.timing import NOTICEABLE_WAIT, ResidentBatch, Step, Trial, measure, new_trial
from vitmnist.data.sampler import EpochSampler
from vitmnist.data.seeding import preserved_generators
from vitmnist.data.tensors import TensorSet
from vitmnist.errors import ConfigError
from vitmnist.runtime.cpu import available_cores
from vitmnist.runtime.memory import Memory, check_fits, peak_memory

SIMPLEST_FIRST = ("gpu_slice", "ram", "prefetch", "cache", "disk")
TIE = 0.05  # a loader that is slower by at most this share is preferred if it is earlier in the list
WORKER_COUNTS = (0, 2, 4, 8, 16, 32, 64)
DOUBLING_PAYS = 0.1  # the share of the time that twice as many workers must save for the next doubling to be tried


@dataclass
class AutoOptions:
    """See `conf/data/loader/auto.yaml`. Without candidates, all suitable registered loaders are tried."""

    batches: int = bounded(30, at_least=1)
    seconds: float = bounded(3.0, above=0)
    worker_counts: list[int] | None = None
    candidates: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Candidate:
    """A row of the table: the expected times of a training epoch with a loader, in seconds, or why it was refused.

    `epoch_s_low` and `epoch_s_high` are the range over blocks of batches: the noise of the measurement.
    """

    name: str
    setup_s: float = 0.0
    epoch_s: float = 0.0
    epoch_s_low: float = 0.0
    epoch_s_high: float = 0.0
    data_wait_s: float | None = None
    refused: str | None = None

    def is_within_noise_of(self, other: Candidate) -> bool:
        """Whether the ranges of two timed candidates overlap."""
        return self.epoch_s_low <= other.epoch_s_high and other.epoch_s_low <= self.epoch_s_high

    def record(self) -> dict[str, Any]:
        """The row for `result.json`; without times if it was refused."""
        return {"name": self.name, "refused": self.refused} if self.refused else asdict(self)


@dataclass(frozen=True)
class Choice:
    """The chosen loader, the reason, and the table.

    `model_alone_s` is an epoch of the model over one batch that is already on the device; None without a model.
    `decoded` is the set as a trial has decoded it; None if the chosen loader does not need it.
    """

    name: str
    values: dict[str, Any]
    reason: str
    candidates: list[Candidate]
    model_alone_s: float | None
    decoded: Data | None = None

    @property
    def built(self) -> dict[str, str]:
        """The chosen registered names, for the `choices` of `result.json`."""
        base = self.values.get("base")
        return {"loader": self.values["name"]} | ({"loader.base": base["name"]} if base else {})

    def record(self) -> dict[str, Any]:
        """The table for `result.json`; times in seconds."""
        rows = [row.record() for row in self.candidates]
        return {"name": self.name, "reason": self.reason, "candidates": rows, "model_alone_s": self.model_alone_s}

    def table(self) -> str:
        """The table as text; the column of waiting times only with a model."""
        timed = [row for row in self.candidates if not row.refused]
        columns = {
            "candidate": [row.name for row in timed],
            "set-up, s": [f"{row.setup_s:.3f}" for row in timed],
            "epoch, s": [f"{row.epoch_s:.4g}" for row in timed],
            "range": [f"{row.epoch_s_low:.4g}–{row.epoch_s_high:.4g}" for row in timed],
        }
        lines = [f"refused: {row.refused}" for row in self.candidates if row.refused]
        if self.model_alone_s is not None:
            waits = [(row.data_wait_s or 0.0, row.epoch_s or 1.0) for row in timed]
            columns["waiting for data"] = [f"{wait:.3g} s ({100 * wait / epoch:.0f}%)" for wait, epoch in waits]
            lines.append(f"(the model alone, without loading: {self.model_alone_s:.3g} s)")
        table = tabulate(columns, headers="keys", tablefmt="plain", disable_numparse=True)
        return "\n".join([table, *lines, f"chosen: {self.name}, {self.reason}"])


@LOADERS.register("auto", AutoOptions)
def auto(
    options: AutoOptions, data: Data, sampler: EpochSampler, device: torch.device, step: Step | None = None
) -> Loader:
    """The loader with the fastest epoch; prints the table. Its `choice` is the `Choice`.

    Args:
        step: a training step to time the candidates with; without one, batches are dropped.

    Raises:
        ConfigError: no candidate can be used.
    """
    trial_of = (lambda loader: new_trial(loader, device, step)) if step else None
    # The number of steps depends on the time they take, but what they draw must not change what follows.
    with preserved_generators(device):
        choice = choose(options, data, sampler, device, "", trial_of)
    print(choice.table(), file=sys.stderr)
    loader = LOADERS.build(choice.values, choice.decoded or data, sampler, device)
    loader.choice = replace(choice, decoded=None)
    return loader


def choose(
    options: AutoOptions,
    data: Data,
    sampler: EpochSampler,
    device: torch.device,
    key: str = "data.loader",
    trial_of: Callable[[Loader], Trial] | None = None,
    also: Sequence[tuple[Data, EpochSampler]] = (),
) -> Choice:
    """Time the candidates that fit and choose the fastest; among equals, the first.

    Args:
        key: where the options are in the configuration.
        trial_of: makes a fresh model and returns its trial with a loader; without one, batches are dropped.
        also: other sets for which a loader of the same kind will be built, whose memory counts too.

    Raises:
        ConfigError: a candidate that is unknown or misconfigured, or none that can be used.
    """
    candidates: dict[str, Any] = dict(options.candidates) or {
        name: LOADERS.complete({"name": name}) for name in _default_names(data)
    }
    if negative := [workers for workers in options.worker_counts or () if workers < 0]:
        raise ConfigError(f"{join(key, 'worker_counts')}: {negative[0]} must be at least 0")
    for name, values in candidates.items():
        LOADERS.member(values, join(key, f"candidates.{name}"))
        if values["name"] == "auto":
            raise ConfigError(f"{join(key, f'candidates.{name}')}: auto cannot be its own candidate")
    bench = Bench(options, data, sampler, device, trial_of, also)
    model_alone_s = bench.time_model() if trial_of and len(sampler) else None
    table: list[Candidate] = []
    for name, values in tqdm(candidates.items(), desc="timing loaders", leave=False, disable=None):
        # What `ram` holds in memory already, `cache` would only decode again.
        if options.candidates or name != "cache" or not any(row.name == "ram" and not row.refused for row in table):
            table.append(bench.time_loader(name, values))
    _add_worker_counts(bench, candidates, table)
    timed = [row for row in table if not row.refused]
    if not timed:
        raise ConfigError("no candidate can be used:\n" + "\n".join(str(row.refused) for row in table))
    fastest = min(timed, key=lambda row: row.epoch_s)
    chosen = next(row for row in timed if row.epoch_s <= fastest.epoch_s * (1 + TIE))
    reason = _reason(chosen, fastest, timed)
    values = dict(bench.fitted.get(chosen.name, candidates[chosen.name]))
    return Choice(chosen.name, values, reason, table, model_alone_s, bench.decoded if _decodes(values) else None)


def _default_names(data: Data) -> list[str]:
    """All registered loaders that suit the data, the simplest first.

    `cache` is left out for tensors in memory: it would write a copy of them to the disk.
    """
    unsuited = ("auto", "cache") if isinstance(data, TensorSet) and not data.mapped else ("auto",)
    names = [*SIMPLEST_FIRST, *(name for name in LOADERS.names() if name not in SIMPLEST_FIRST)]
    return [name for name in names if name not in unsuited]


@dataclass
class Bench:
    """Times loaders under the same conditions; see `choose` for the fields."""

    options: AutoOptions
    data: Data
    sampler: EpochSampler
    device: torch.device
    trial_of: Callable[[Loader], Trial] | None
    also: Sequence[tuple[Data, EpochSampler]]
    model_memory: Memory = field(default_factory=Memory)
    decoded: TensorSet | None = None
    """A data set that is read sample by sample, once `ram` has decoded it."""
    fitted: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The options that candidates were timed with, fitted to the memory that the model leaves."""

    def time_model(self) -> float:
        """Seconds of an epoch over one batch that is already on the device; also measures the model's memory."""
        assert self.trial_of
        loader, trial_of = ResidentBatch(self.data, self.sampler, self.device), self.trial_of
        self.model_memory, timing = peak_memory(
            lambda: measure(loader, self.options.batches, self.options.seconds, trial_of(loader)), self.device
        )
        return timing.mean * len(self.sampler)

    def time_loader(self, name: str, values: Mapping[str, Any]) -> Candidate:
        """The expected times of an epoch, or the reason why the loader cannot be used."""
        try:
            # Checked before the loader and a model are built for the trial: what is free now is all there is.
            data = self.decoded if self.decoded is not None and _decodes(values) else self.data
            sets = [(data, self.sampler), *self.also]
            reserve = self.model_memory if self.trial_of else None
            values = self.fitted[name] = with_resident_fraction(values, sets, self.device, reserve)
            needs = [needs_of(values, *each, self.device) for each in sets]
            check_fits(name, sum(needs, Memory()), self.device, self.model_memory)
            started = time.perf_counter()
            with LOADERS.build(values, data, self.sampler, self.device) as loader:
                setup_s = time.perf_counter() - started
                trial = self.trial_of(loader) if self.trial_of else new_trial(loader, self.device)
                timing = measure(loader, self.options.batches, self.options.seconds, trial)
            if values["name"] == "ram" and isinstance(loader, HostLoader):
                self.decoded = loader.tensors
        except Exception as error:  # whatever it is, the other candidates may work
            reason = str(error) or type(error).__name__
            return Candidate(name, refused=reason if reason.startswith(f"{name}: ") else f"{name}: {reason}")
        size = len(self.sampler)
        waiting = timing.waiting * size if self.trial_of else None
        return Candidate(name, setup_s, timing.mean * size, timing.low * size, timing.high * size, waiting)


def _decodes(values: Mapping[str, Any]) -> bool:
    """Whether a loader is `ram`, or prefetches from it."""
    return bool((values.get("base") or values)["name"] == "ram")


def _add_worker_counts(bench: Bench, candidates: dict[str, Any], table: list[Candidate]) -> None:
    """Time the candidates that have workers with other numbers of them, and add those to `candidates` and `table`.

    Does nothing if some loader leaves nothing to wait for. Beyond the number of cores, a doubling is tried only if the
    one before paid: samples that compute gain nothing there, samples that wait for a disk or network do.
    """
    best = min((row for row in table if not row.refused), key=lambda row: row.epoch_s, default=None)
    if best and best.data_wait_s is not None and best.data_wait_s <= NOTICEABLE_WAIT * best.epoch_s:
        return
    given = bench.options.worker_counts
    for default in [row for row in table if not row.refused and "num_workers" in candidates[row.name]]:
        values, best_s = candidates[default.name], default.epoch_s
        for workers in WORKER_COUNTS if given is None else given:
            if workers == values["num_workers"]:
                continue
            name = f"{default.name}, {workers} workers"
            candidates[name] = {**values, "num_workers": workers}
            row = bench.time_loader(name, candidates[name])
            table.append(row)
            pays = not row.refused and row.epoch_s < best_s * (1 - DOUBLING_PAYS)
            if given is None and workers > available_cores() and not pays:
                break
            best_s = best_s if row.refused else min(best_s, row.epoch_s)


def _reason(chosen: Candidate, fastest: Candidate, timed: list[Candidate]) -> str:
    reason = f"{chosen.epoch_s:.3g} s an epoch expected, "
    if len(timed) == 1:
        return f"{reason}the only loader that fits"
    if chosen is fastest:
        reason += "the least"
    else:
        reason += f"within {TIE:.0%} of the least ({fastest.epoch_s:.3g} s) and earlier in the list"
    equal = [other.name for other in timed if other is not chosen and other.is_within_noise_of(chosen)]
    return reason + (f"; within noise of it: {', '.join(equal)}" if equal else "")
