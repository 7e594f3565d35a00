"""Measures instead of guessing: each loader that fits is timed for a few batches, and the fastest is built.

All loaders deliver the same batches, so the choice changes the time and nothing else.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import Any

import torch
from tabulate import tabulate

from vitmnist.config.validation import bounded, join
from vitmnist.data.decoding import SharedSamples
from vitmnist.data.loaders.base import LOADERS, Data, Loader, needs_of
from vitmnist.data.loaders.timing import (
    NOTICEABLE_WAIT,
    Resident,
    Step,
    Timing,
    Trial,
    measure,
    time_loading,
    time_step,
)
from vitmnist.data.sampler import EpochSampler
from vitmnist.data.seeding import preserved_generators
from vitmnist.data.tensors import TensorSet
from vitmnist.errors import ConfigError
from vitmnist.runtime.memory import Memory, check_fits, peak_memory

SIMPLEST_FIRST = ("gpu_slice", "ram", "prefetch", "cache", "disk")
TIE = 0.05  # a loader that is slower by at most this share is preferred if it stands earlier in the list
MOST_WORKERS = 64
DOUBLING_PAYS = 0.1  # the share of the time that twice as many workers must save for the next doubling to be tried


@dataclass
class AutoOptions:
    """See `conf/data/loader/auto.yaml`. Without candidates, all registered loaders that can serve are."""

    batches: int = bounded(30, at_least=1)
    seconds: float = bounded(3.0, above=0)
    worker_counts: list[int] | None = None
    candidates: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Candidate:
    """A row of the table: what to expect of a loader in a training epoch, in seconds, or why it was refused.

    `epoch_s_low` and `epoch_s_high` are the range over blocks of batches, which is the noise of the measurement.
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


@dataclass(frozen=True)
class Choice:
    """The loader that was chosen, the reason, and the table."""

    name: str
    values: dict[str, Any]
    reason: str
    candidates: list[Candidate]
    model_alone_s: float | None
    """An epoch of the model over one batch that is already on the device; None without a model."""

    @property
    def built(self) -> dict[str, str]:
        """The registered names that were chosen, as `result.json` has them among its `choices`."""
        base = self.values.get("base")
        return {"loader": self.values["name"]} | ({"loader.base": base["name"]} if base else {})

    def record(self) -> dict[str, Any]:
        """The table for `result.json`; times in seconds, none of what was refused."""
        table = asdict(self)
        del table["values"]
        table["candidates"] = [
            {"name": row["name"], "refused": row["refused"]} if row["refused"] else row for row in table["candidates"]
        ]
        return table

    def table(self) -> str:
        """The table for people; without a model there is nothing that waits, and no column for it."""
        timed = [candidate for candidate in self.candidates if not candidate.refused]
        columns = {
            "candidate": [candidate.name for candidate in timed],
            "set-up, s": [f"{candidate.setup_s:.3f}" for candidate in timed],
            "epoch, s": [f"{candidate.epoch_s:.4g}" for candidate in timed],
            "range": [f"{candidate.epoch_s_low:.4g}–{candidate.epoch_s_high:.4g}" for candidate in timed],
        }
        if self.model_alone_s is not None:
            waits = [(candidate.data_wait_s or 0.0, candidate.epoch_s or 1.0) for candidate in timed]
            columns["waiting for data"] = [f"{wait:.3g} s ({100 * wait / epoch:.0f}%)" for wait, epoch in waits]
        lines = [tabulate(columns, headers="keys", tablefmt="plain", disable_numparse=True)]
        lines += [f"refused: {candidate.refused}" for candidate in self.candidates if candidate.refused]
        if self.model_alone_s is not None:
            lines.append(f"(the model alone, without loading: {self.model_alone_s:.3g} s)")
        return "\n".join([*lines, f"chosen: {self.name}, {self.reason}"])


@LOADERS.register("auto", AutoOptions)
def auto(
    options: AutoOptions, data: Data, sampler: EpochSampler, device: torch.device, step: Step | None = None
) -> Loader:
    """The loader that delivers an epoch soonest; prints the table. The loader's `choice` is the `Choice`.

    Args:
        step: a training step that the candidates are timed with; without one, batches are taken and dropped.

    Raises:
        ConfigError: no candidate can be used.
    """
    shared = data if isinstance(data, TensorSet) else SharedSamples(data, sampler.seed)
    new_trial = (lambda: time_step(step, device)) if step else None
    # How many batches the step is called with depends on the time they take; what it draws must not.
    devices = [device] if device.type == "cuda" else []
    with preserved_generators(), torch.random.fork_rng(devices):
        choice = choose(options, shared, sampler, device, "", new_trial=new_trial)
    print(choice.table(), file=sys.stderr)
    loader = LOADERS.build(choice.values, shared, sampler, device)
    loader.choice = choice
    return loader


def _default_names(data: Data) -> list[str]:
    """The candidates if none are given: all registered loaders that can serve, the simplest first."""
    # What is in memory already is not copied into a file, which would stay.
    unfit = ("auto", "cache") if isinstance(data, TensorSet) and not data.mapped else ("auto",)
    return sorted((name for name in LOADERS.names() if name not in unfit), key=_rank)


def _rank(name: str) -> tuple[int, str]:
    """Which of equally fast loaders is preferred: the simplest, as in `conf/data/loader/auto.yaml`."""
    return (SIMPLEST_FIRST.index(name) if name in SIMPLEST_FIRST else len(SIMPLEST_FIRST)), name


def choose(
    options: AutoOptions,
    data: Data,
    sampler: EpochSampler,
    device: torch.device,
    key: str = "data.loader",
    new_trial: Callable[[], Trial] | None = None,
    also: Sequence[tuple[Data, EpochSampler]] = (),
) -> Choice:
    """Time the candidates that fit and choose the fastest; among equals, the first.

    Args:
        key: where the options stand in the configuration.
        also: other sets that a loader of the same kind will be built for, whose memory counts too.
        new_trial: makes a fresh model and returns its trial; without one, batches are taken and dropped.

    Raises:
        ConfigError: a candidate that is unknown or wrongly configured, or none that can be used.
    """
    candidates: dict[str, Any] = dict(options.candidates) or {
        name: LOADERS.complete({"name": name}) for name in _default_names(data)
    }
    if wrong := [workers for workers in options.worker_counts or () if workers < 0]:
        raise ConfigError(f"{join(key, 'worker_counts')}: {wrong[0]} must be at least 0")
    for name, values in candidates.items():
        LOADERS.member(values, join(key, f"candidates.{name}"))
        if values["name"] == "auto":
            raise ConfigError(f"{join(key, f'candidates.{name}')}: auto cannot be its own candidate")
    reserve, alone = Memory(), None
    if new_trial and len(sampler):
        reserve, alone = _model_alone(options, data, sampler, device, new_trial)

    def timed(name: str, values: Mapping[str, Any]) -> Candidate:
        try:
            # Checked before the loader and a model are built for the trial: what is free now is all there is.
            others = (needs_of(values, *other, device) for other in also)
            check_fits(name, sum(others, needs_of(values, data, sampler, device)), device, reserve)
            started = time.perf_counter()
            with LOADERS.build(values, data, sampler, device) as loader:
                setup_s = time.perf_counter() - started
                trial = new_trial() if new_trial else time_loading(device)
                timing = measure(loader, options.batches, options.seconds, trial)
        except Exception as error:  # whatever it is, the other candidates may work
            reason = str(error) or type(error).__name__
            return Candidate(name, refused=reason if reason.startswith(f"{name}: ") else f"{name}: {reason}")
        return _expected(name, setup_s, timing, len(sampler))

    table = [timed(name, values) for name, values in candidates.items()]
    for row in _with_more_workers(options, candidates, table, timed):
        table.append(row)
    best = [candidate for candidate in table if not candidate.refused]
    if not best:
        raise ConfigError("no candidate can be used:\n" + "\n".join(str(row.refused) for row in table))
    fastest = min(best, key=lambda candidate: candidate.epoch_s)
    chosen = next(candidate for candidate in best if candidate.epoch_s <= fastest.epoch_s * (1 + TIE))
    return Choice(chosen.name, dict(candidates[chosen.name]), _reason(chosen, fastest, best), table, alone)


def _expected(name: str, setup_s: float, timing: Timing, batches: int) -> Candidate:
    """What an epoch of so many batches is expected to take."""
    waiting = None if timing.waiting is None else timing.waiting * batches
    return Candidate(name, setup_s, timing.mean * batches, timing.low * batches, timing.high * batches, waiting)


def _with_more_workers(
    options: AutoOptions,
    candidates: dict[str, Any],
    table: list[Candidate],
    timed: Callable[[str, Mapping[str, Any]], Candidate],
) -> Iterator[Candidate]:
    """Rows of the candidates that have workers, with other numbers of them; added to `candidates` by their names.

    None are tried where another loader leaves nothing to wait for. Beyond the cores, a doubling is tried only if the
    one before paid: samples that compute gain nothing there, samples that wait for a disk or network do.
    """
    best = min((row for row in table if not row.refused), key=lambda row: row.epoch_s, default=None)
    if best and best.data_wait_s is not None and best.data_wait_s <= NOTICEABLE_WAIT * best.epoch_s:
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for own in [row for row in table if not row.refused and "num_workers" in candidates[row.name]]:
        values, least = candidates[own.name], own.epoch_s
        for workers in options.worker_counts if options.worker_counts is not None else _doublings():
            if workers == values["num_workers"]:
                continue
            name = f"{own.name}, {workers} workers"
            candidates[name] = {**values, "num_workers": workers}
            row = timed(name, candidates[name])
            yield row
            pays = not row.refused and row.epoch_s < least * (1 - DOUBLING_PAYS)
            if options.worker_counts is None and workers > cores and not pays:
                break
            least = least if row.refused else min(least, row.epoch_s)


def _doublings() -> Iterator[int]:
    yield 0
    for power in count(1):
        if (workers := 2**power) > MOST_WORKERS:
            return
        yield workers


def _reason(chosen: Candidate, fastest: Candidate, timed: list[Candidate]) -> str:
    reason = f"{chosen.epoch_s:.3g} s an epoch expected, "
    if len(timed) == 1:
        return f"{reason}the only one that can be used"
    if chosen is fastest:
        reason += "the least"
    else:
        reason += f"within {TIE:.0%} of the least ({fastest.epoch_s:.3g} s) and earlier in the list"
    equal = [other.name for other in timed if other is not chosen and other.is_within_noise_of(chosen)]
    return reason + (f"; within the noise of it: {', '.join(equal)}" if equal else "")


def _model_alone(
    options: AutoOptions, data: Data, sampler: EpochSampler, device: torch.device, new_trial: Callable[[], Trial]
) -> tuple[Memory, float]:
    """The memory that a model needs, and the seconds that an epoch takes it over a batch that is there already."""

    def work() -> float:
        return measure(Resident(data, sampler, device), options.batches, options.seconds, new_trial()).mean

    memory, seconds = peak_memory(work, device)
    return memory, seconds * len(sampler)
