"""Measures instead of guessing: each loader that fits is timed for a few batches, and the fastest is built.

All loaders deliver the same batches, so the choice changes nothing but the time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from tabulate import tabulate
from tqdm import tqdm

from vitmnist.config.validation import AUTO, bounded, join
from vitmnist.data.sampler import EpochSampler
from vitmnist.data.seeding import preserved_generators
from vitmnist.data.tensors import SampleSource
from vitmnist.errors import ConfigError, allowed_names
from vitmnist.loaders.base import LOADERS, Loader, Place, WrapperOptions, needs_of, place_of
from vitmnist.loaders.batch_stream import BatchStream, ResidentBatch
from vitmnist.loaders.timing import Alternative, Bench, Block, Figure, Step, Timed, calling, take_turns, try_workers
from vitmnist.runtime.memory import Memory, check_fits, peak_memory


@dataclass
class AutoOptions(WrapperOptions):
    """See `conf/data/loader/auto.yaml`."""

    batches: int = bounded(30, at_least=1)
    seconds: float = bounded(3.0, above=0)
    worker_counts: list[int] | None = None
    candidates: list[str] | None = None


@dataclass(frozen=True)
class LoaderSelection:
    """The selected loader, the reason, and the table.

    `candidates` is the record for `result.json`: expected seconds of an epoch, with their range over blocks.
    `model_alone_s` is an epoch of the model over one batch that is already on the device; None without a model.
    """

    name: str
    values: dict[str, Any]
    reason: str
    candidates: list[dict[str, Any]]
    model_alone_s: float | None

    def record(self) -> dict[str, Any]:
        """For `result.json`."""
        return {key: getattr(self, key) for key in ("name", "reason", "candidates", "model_alone_s")}

    def table(self) -> str:
        """The table as text; the column of waiting times only with a model."""
        timed = [row for row in self.candidates if not row["refused"]]
        columns = {
            "candidate": [row["name"] for row in timed],
            "set-up, s": [f"{row['setup_s']:.3f}" for row in timed],
            "epoch, s": [f"{row['epoch_s']:.4g}" for row in timed],
            "range": [f"{row['epoch_s_low']:.4g}–{row['epoch_s_high']:.4g}" for row in timed],
        }
        lines = [f"refused: {row['refused']}" for row in self.candidates if row["refused"]]
        if self.model_alone_s is not None:
            waits = [(row["data_wait_s"], row["epoch_s"] or 1.0) for row in timed]
            columns["waiting for data"] = [f"{wait:.3g} s ({100 * wait / epoch:.0f}%)" for wait, epoch in waits]
            lines.append(f"(the model alone, without loading: {self.model_alone_s:.3g} s)")
        table = tabulate(columns, headers="keys", tablefmt="plain", disable_numparse=True)
        return "\n".join([table, *lines, f"chosen: {self.name}, {self.reason}"])


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
    timed_of = (lambda loader: Timed(BatchStream(loader, device), calling(step))) if step else None
    # The number of steps depends on the time they take, but what they draw must not change what follows.
    with preserved_generators(device):
        selection, data = select_loader(options, data, sampler, device, "", timed_of)
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
    timed_of: Callable[[Loader], Timed] | None = None,
    also: Sequence[tuple[SampleSource, EpochSampler]] = (),
) -> tuple[LoaderSelection, SampleSource]:
    """Time the loaders that fit and select the fastest.

    Args:
        key: where the options are in the configuration.
        timed_of: how a training step is timed with a loader; without one, batches are dropped.
        also: other sets for which a loader of the same kind will be built, whose memory counts too.

    Returns:
        The selection, and the set to build the loader from, which a trial may have decoded.

    Raises:
        ConfigError: an unknown candidate, or none that can be used.
    """
    names = _candidates(options, key)
    with ExitStack() as stack:
        bench = Candidates(stack, data=data, sampler=sampler, device=device, timed_of=timed_of, also=also)
        bench.are_named = bool(options.candidates)
        model = bench.add_model(timed_of) if timed_of and len(sampler) else None
        for name in tqdm(names, desc="building loaders", leave=False, disable=None):
            # A file would only hold what is in memory already.
            if options.candidates or place_of(name) is not Place.FILE or bench.decoded is None:
                bench.add_loader(name, {"name": name})
        bench.add_workers(options.worker_counts)
        take_turns(bench.turns, options.batches, options.seconds * len(bench.turns))
    size = len(sampler)
    for one in bench.turns:
        one.complete_row([Block(0.0, 0.0)] if not size else [])
    rows = [_record(row, size, with_model=model is not None) for row in bench.rows]
    timed = {row["name"]: row for row in rows if not row["refused"]}
    if not timed:
        raise ConfigError("no candidate can be used:\n" + "\n".join(row["refused"] for row in rows))
    name = min(timed, key=lambda name: timed[name]["epoch_s"])
    model_alone_s = Figure.of(block.batch_s for block in model.blocks).median * size if model else None
    values = bench.values[name]
    return LoaderSelection(name, values, _reason(name, timed), rows, model_alone_s), bench.data_for(values)


def _record(row: Alternative, size: int, with_model: bool) -> dict[str, Any]:
    """A candidate as `result.json` has it; an epoch has `size` batches."""
    if not row.batch_s or not row.waiting_s:
        return {"name": row.name, "refused": f"{row.name}: {row.refused}"}
    epoch = row.batch_s
    times = {"epoch_s": epoch.median * size, "epoch_s_low": epoch.low * size, "epoch_s_high": epoch.high * size}
    waiting = row.waiting_s.median * size if with_model else None
    return {"name": row.name, "setup_s": row.set_up_s, **times, "data_wait_s": waiting, "refused": None}


def _candidates(options: AutoOptions, key: str) -> list[str]:
    """The names of the loaders to try: those asked for, or all that are registered."""
    if negative := [workers for workers in options.worker_counts or () if workers < 0]:
        raise ConfigError(f"{join(key, 'worker_counts')}: {negative[0]} must be at least 0")
    known = [name for name in LOADERS.names() if LOADERS.options_of(name) is not AutoOptions]
    for name in options.candidates or ():
        if name not in known:
            raise ConfigError(f"{join(key, 'candidates')}={name}: not known; {allowed_names(name, known)}")
    # What decodes into memory first, because others reuse it; files last, because they may not be needed then.
    places = {name: place_of(name) for name in options.candidates or known}
    return sorted(places, key=lambda name: (places[name] is Place.FILE, places[name] is not Place.HOST))


@dataclass
class Candidates(Bench):
    """The loaders of `auto`; see `select_loader` for the fields."""

    data: SampleSource = field(kw_only=True)
    sampler: EpochSampler = field(kw_only=True)
    device: torch.device = field(kw_only=True)
    timed_of: Callable[[Loader], Timed] | None = None
    also: Sequence[tuple[SampleSource, EpochSampler]] = ()
    are_named: bool = False  # by the user; only then a loader is tried whose memory is unknown
    model_memory: Memory = field(default_factory=Memory)
    decoded: SampleSource | None = None  # in host memory, once a loader has decoded them
    values: dict[str, dict[str, Any]] = field(default_factory=dict)  # of each row

    def add_model(self, timed_of: Callable[[Loader], Timed]) -> Timed:
        """The step over one batch that is already on the device; also measures the model's memory."""
        model = timed_of(ResidentBatch(self.data, self.sampler, self.device))
        self.model_memory, _ = peak_memory(model.time_block, self.device)
        self.turns.append(model)
        return model

    def add_loader(self, name: str, values: Mapping[str, Any]) -> Timed | None:
        """A loader with these options, as a row of this name; None if the row says why it cannot be used."""
        return self.add(name, partial(self._build, values))

    def add_workers(self, counts: list[int] | None) -> None:
        """Try other numbers of worker processes, unless the fastest loader already leaves nothing to wait for."""
        timed = {one.row.name: one for one in self.turns if one.row and one.first}
        fastest = min((one.first for one in timed.values() if one.first), default=None)
        for name, given in timed.items() if fastest and fastest.waits else ():
            values = self.values[name]
            workers = {**values, **getattr(given.stream.source, "settings", {})}.get("num_workers")
            # `auto` is left where threads read picture files, as many as there are cores: workers only if asked for.
            if workers is not None and (workers != AUTO or counts):
                try_workers(given, workers, partial(self._add_workers, name, values), counts)

    def _add_workers(self, name: str, values: Mapping[str, Any], workers: int) -> Timed | None:
        return self.add_loader(f"{name}, {workers} workers", {**values, "num_workers": workers})

    def data_for(self, values: Mapping[str, Any]) -> SampleSource:
        """The set for a loader: as another one has decoded it, if the loader keeps all of it in memory."""
        is_kept = place_of(values["name"]) in (Place.HOST, Place.DEVICE)
        return self.decoded if self.decoded is not None and is_kept else self.data

    def _build(self, values: Mapping[str, Any], row: Alternative, stack: ExitStack) -> Timed:
        """A loader, if there is memory for it next to the model and what was built before."""
        values = LOADERS.complete(values)
        data = self.data_for(values)
        needs = needs_of(values, [(data, self.sampler), *self.also], self.device)
        if needs is not None:
            check_fits(values["name"], needs, self.device, self.model_memory)
        elif not self.are_named:
            raise ConfigError("does not say how much memory it needs, so it is tried only if candidates= names it")
        started = time.perf_counter()
        loader = stack.enter_context(LOADERS.build(values, data, self.sampler, self.device))
        self.values[row.name], row.set_up_s = values, time.perf_counter() - started
        if loader.decoded is not None:
            self.decoded = loader.decoded
        return self.timed_of(loader) if self.timed_of else Timed(BatchStream(loader, self.device))


def _reason(chosen: str, timed: Mapping[str, dict[str, Any]]) -> str:
    """Why a loader was chosen, and which others are within noise of it: those whose ranges overlap with its own."""
    best = timed[chosen]
    text = f"{best['epoch_s']:.3g} s an epoch expected, "
    if len(timed) == 1:
        return f"{text}the only loader that fits"
    low, high = best["epoch_s_low"], best["epoch_s_high"]
    equal = [name for name, row in timed.items() if row["epoch_s_low"] <= high and low <= row["epoch_s_high"]]
    equal.remove(chosen)
    return f"{text}the least" + (f"; within noise of it: {', '.join(equal)}" if equal else "")
