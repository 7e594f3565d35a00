"""Measures instead of guessing: each loader that fits is timed for a few batches, and the fastest is built.

All loaders deliver the same batches, so the choice changes nothing but the time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from itertools import repeat
from typing import Any

import torch
from tqdm import tqdm

from vitmnist.config.validation import AUTO, bounded, join
from vitmnist.data.randomness import preserved_random_state
from vitmnist.data.sampler import EpochSampler
from vitmnist.data.sources import SampleSource
from vitmnist.errors import ConfigError, allowed_names
from vitmnist.loaders.base import LOADERS, Batch, Batches, Loader, Place, WrapperOptions, needs_of, place_of
from vitmnist.runtime.cpu import available_cores
from vitmnist.runtime.device import backend_of
from vitmnist.runtime.memory import Memory, check_fits, peak_memory
from vitmnist.store.tree import map_tensors
from vitmnist.timing.benchmark import Benchmark, Block, Candidate, Step, as_one_argument_step, rows_of
from vitmnist.timing.table import Figure, Row, format_rows, format_s

WORKER_COUNTS = (0, 2, 4, 8, 16, 32, 64)  # Tried up to the number of cores


@dataclass
class AutoOptions(WrapperOptions):
    """See `conf/data/loader/auto.yaml`."""

    batches: int = bounded(30, at_least=1)
    seconds: float = bounded(3.0, above=0)
    worker_counts: list[int] | None = None
    candidates: list[str] | None = None


@dataclass(frozen=True)
class LoaderSelection:
    """The selected loader, the reason, and the table of expected seconds of an epoch.

    `model_alone_s` is an epoch of the model over one batch that is already on the device; None without a model.
    """

    name: str
    values: dict[str, Any]
    reason: str
    rows: list[Row]
    model_alone_s: float | None

    def record(self) -> dict[str, Any]:
        """For `result.json`."""
        candidates = [asdict(row) for row in self.rows]
        return {"name": self.name, "reason": self.reason, "candidates": candidates, "model_alone_s": self.model_alone_s}

    def table(self) -> str:
        """The table as text."""
        alone_s = self.model_alone_s
        alone = "" if alone_s is None else f"(the model alone, without loading: {format_s(alone_s)})\n"
        return f"{format_rows(self.rows)}\n{alone}chosen: {self.name}, {self.reason}"


class ResidentBatch(Loader):
    """Repeats one batch that is already on the device, to time a model that never waits for data."""

    def __init__(self, data: SampleSource, sampler: EpochSampler, device: torch.device) -> None:
        super().__init__(sampler)
        batch = data.read(slice(0, min(sampler.rank_batch_size, sampler.size)))
        self._batch: Batch = map_tensors(backend_of(device).to_device, batch)

    def batches(self, number: int, start: int) -> Batches:
        yield from repeat(self._batch, len(self) - start)


def candidate_of(
    loader: Loader,
    device: torch.device,
    step: Callable[[Any], object] | None = None,
    epoch: Callable[[int], Any] | None = None,
) -> Candidate:
    """A loader as a candidate; a short last batch is not timed, because its time would mislead.

    Args:
        epoch: yields the step's arguments for epoch n; by default `loader.epoch`.
    """
    sampler = loader.sampler
    return Candidate("", loader, device, step, epoch or loader.epoch, sampler.size // sampler.batch_size or 1)


@LOADERS.register("auto", AutoOptions)
def auto(
    options: AutoOptions, data: SampleSource, sampler: EpochSampler, device: torch.device, step: Step | None = None
) -> Loader:
    """The loader with the fastest epoch; prints the table. Its `selection` is the `LoaderSelection`.

    Args:
        step: a training step to time the candidates with; without one, batches are dropped.

    Raises:
        ConfigError: no candidate can be used.
    """
    timed = partial(candidate_of, device=device, step=as_one_argument_step(step)) if step else None
    # The number of steps depends on the time they take, but what they draw must not change what follows.
    with preserved_random_state(device=device):
        selection, data = select_loader(options, data, sampler, device, "", timed)
    print(selection.table(), file=sys.stderr)
    loader = LOADERS.build(selection.values, data, sampler, device)
    loader.selection = selection
    return loader


def select_loader(
    options: AutoOptions,
    data: SampleSource,
    sampler: EpochSampler,
    device: torch.device,
    key: str = "data.loader",
    timed: Callable[[Loader], Candidate] | None = None,
    also: Sequence[tuple[SampleSource, EpochSampler]] = (),
) -> tuple[LoaderSelection, SampleSource]:
    """Time the loaders that fit and select the fastest.

    Args:
        key: where the options are in the configuration.
        timed: makes a loader a candidate with a training step; without it, batches are dropped.
        also: other sets for which a loader of the same kind will be built, whose memory counts too.

    Returns:
        The selection, and the set to build the loader from, which a trial may have decoded.

    Raises:
        ConfigError: an unknown candidate, or none that can be used.
    """
    names = _candidates(options, key)
    if not len(sampler):
        values = LOADERS.complete({"name": names[0]})
        return LoaderSelection(names[0], values, "an epoch has no batches", [], None), data
    with ExitStack() as stack:
        loaders = LoaderBenchmark(stack, data, sampler, device, timed, also)
        for name in tqdm(names, desc="building loaders", leave=False, disable=None):
            # A file would only hold what is in memory already.
            if options.candidates or place_of(name) is not Place.FILE or loaders.decoded is None:
                loaders.add_loader(name, {"name": name})
        loaders.add_workers(options.worker_counts)
        loaders.run(options.batches, options.seconds * len(loaders.candidates))
    rows = rows_of(loaders.candidates, len(sampler), is_compared=False)
    alone = rows.pop(0).epoch_s if timed else None
    epochs_s = {row.name: row.epoch_s for row in rows if row.epoch_s}
    if not epochs_s:
        raise ConfigError("\n".join(["no candidate can be used:", *(f"{row.name}: {row.error}" for row in rows)]))
    name = min(epochs_s, key=lambda name: epochs_s[name].median)
    values, reason = loaders.values[name], _reason(name, epochs_s)
    return LoaderSelection(name, values, reason, rows, alone.median if alone else None), loaders.data_for(values)


def _candidates(options: AutoOptions, key: str) -> list[str]:
    """The names of the loaders to try: those asked for, or all that are registered."""
    if negative := [workers for workers in options.worker_counts or () if workers < 0]:
        raise ConfigError(f"{join(key, 'worker_counts')}: {negative[0]} must be at least 0")
    names = [name for name in LOADERS.names() if LOADERS.description_of(name) is not AutoOptions]
    for name in options.candidates or ():
        if name not in names:
            raise ConfigError(f"{join(key, 'candidates')}={name}: not known; {allowed_names(name, names)}")
    # What decodes into memory first, because others reuse it; files last, because they may not be needed then.
    places = {name: place_of(name) for name in options.candidates or names}
    return sorted(places, key=lambda name: (places[name] is Place.FILE, places[name] is not Place.HOST))


@dataclass
class LoaderBenchmark(Benchmark):
    """The loaders of `auto`; see `select_loader` for the arguments. With `timed`, the model alone comes first."""

    data: SampleSource
    sampler: EpochSampler
    device: torch.device
    timed: Callable[[Loader], Candidate] | None
    also: Sequence[tuple[SampleSource, EpochSampler]]

    def __post_init__(self) -> None:
        self.decoded: SampleSource | None = None  # In host memory, once a loader has decoded the set
        self.values: dict[str, dict[str, Any]] = {}  # The options of each candidate
        self.model_memory = Memory()
        if self.timed:
            model = self.timed(ResidentBatch(self.data, self.sampler, self.device))
            model.is_required = True  # An error is that of the step
            self.model_memory = peak_memory(model.time_block, self.device)
            self.candidates.append(model)

    def add_loader(self, name: str, values: Mapping[str, Any]) -> Candidate:
        """A loader with these options, as a row of this name."""
        return self.add(name, partial(self._build, name, values))

    def add_workers(self, counts: list[int] | None) -> None:
        """Try other numbers of worker processes, unless the fastest loader already leaves nothing to wait for."""
        timed = {
            candidate: candidate.warm_up
            for candidate in self.candidates
            if candidate.name in self.values and candidate.warm_up
        }
        fastest = min(timed.values(), key=lambda block: block.batch_s, default=None)
        for candidate, first in timed.items() if fastest and fastest.waits else ():
            values = self.values[candidate.name]
            workers = {**values, **getattr(candidate.source, "settings", {})}.get("num_workers")
            # `auto` is left where threads read picture files, as many as there are cores: workers only if asked for.
            if workers is None or (workers == AUTO and not counts):
                continue
            last: Block | None = first
            for count in WORKER_COUNTS if counts is None else counts:
                if counts is None and (not last or not last.waits or count > max(available_cores(), 2)):
                    break
                last = first
                if count != workers:
                    name = f"{candidate.name}, {count} workers"
                    last = self.add_loader(name, {**values, "num_workers": count}).warm_up

    def data_for(self, values: Mapping[str, Any]) -> SampleSource:
        """The set for a loader: as another one has decoded it, if the loader keeps all of it in memory."""
        is_kept = place_of(values["name"]) in (Place.HOST, Place.DEVICE)
        return self.decoded if self.decoded is not None and is_kept else self.data

    def _build(self, name: str, values: Mapping[str, Any], stack: ExitStack) -> Candidate:
        """A loader, if there is memory for it next to the model and what was built before."""
        values = LOADERS.complete(values)
        data = self.data_for(values)
        needs = needs_of(values, [(data, self.sampler), *self.also], self.device)
        check_fits(values["name"], needs, self.device, self.model_memory)
        started = time.perf_counter()
        loader = stack.enter_context(LOADERS.build(values, data, self.sampler, self.device))
        set_up_s = time.perf_counter() - started
        self.values[name], self.decoded = values, self.decoded or loader.decoded
        candidate = self.timed(loader) if self.timed else candidate_of(loader, self.device)
        candidate.set_up_s = set_up_s
        return candidate


def _reason(chosen: str, epochs_s: Mapping[str, Figure]) -> str:
    """Why a loader was chosen, and which others are within noise of it: those whose ranges overlap with its own."""
    best = epochs_s[chosen]
    text = f"{best.median:.3g} s an epoch expected, "
    if len(epochs_s) == 1:
        return f"{text}the only loader that fits"
    others = {name: figure for name, figure in epochs_s.items() if name != chosen}
    equal = [name for name, figure in others.items() if figure.low <= best.high and best.low <= figure.high]
    return f"{text}the least" + (f"; within noise of it: {', '.join(equal)}" if equal else "")
