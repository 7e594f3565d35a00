"""Measures instead of guessing: each loader that fits is timed for a few batches, and the fastest is built.

All loaders deliver the same batches, so the choice changes the time and nothing else.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice, repeat
from typing import Any

import torch

from vitmnist.clock import synchronize
from vitmnist.config import bounded, join
from vitmnist.data.arrays import Arrays
from vitmnist.data.loaders.contract import LOADERS, Batches, Data, Loader, needs_of
from vitmnist.data.order import EpochOrder
from vitmnist.errors import ConfigError
from vitmnist.memory import Memory, check_fits, peak_memory

WARM_UP = 2  # batches that are not timed: workers start, memory is touched for the first time
LEAST = 3  # batches that are timed in any case
LEAST_WAITING = 8  # and where data are waited for: workers deliver in bursts
SIMPLEST_FIRST = ("gpu_slice", "ram", "prefetch", "cache", "disk")
TIE = 0.05  # differences below this share of the time are noise

Trial = Callable[[Loader], tuple[float, float]]
"""Runs through the loader's epoch 0; gives the seconds it took, and of them the seconds that it waited for data."""


@dataclass
class AutoOptions:
    """See `conf/data/loader/auto.yaml`. Without candidates, all registered loaders are."""

    batches: int = bounded(30, at_least=1)
    seconds: float = bounded(3.0, above=0)
    candidates: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Candidate:
    """A row of the table: what to expect of a loader in a training epoch, or why it is out of the question."""

    name: str
    setup_s: float | None = None
    epoch_s: float | None = None
    data_wait_s: float | None = None
    refused: str | None = None


@dataclass(frozen=True)
class Choice:
    """The loader that was chosen, the reason, and the table."""

    name: str
    values: dict[str, Any]
    reason: str
    candidates: list[Candidate]
    model_alone_s: float | None
    """An epoch of the model over a batch that is there already; None where no model was given."""

    @property
    def built(self) -> dict[str, str]:
        """The registered names that were chosen, as `result.json` has them among its `choices`."""
        base = self.values.get("base")
        return {"loader": self.values["name"]} | ({"loader.base": base["name"]} if base else {})

    def record(self) -> dict[str, Any]:
        """The table for `result.json`; times in seconds."""
        table = asdict(self)
        del table["values"]
        return table

    def table(self) -> str:
        """The table for people."""
        width = max(len("candidate"), *(len(candidate.name) for candidate in self.candidates))
        lines = [f"{'candidate':{width}}  fits  set-up, s  epoch, s  waiting for data"]
        for candidate in self.candidates:
            if candidate.epoch_s is None or candidate.data_wait_s is None:
                lines.append(f"{candidate.name:{width}}  no    {candidate.refused}")
            else:
                share = 100 * candidate.data_wait_s / (candidate.epoch_s or 1)
                times = (
                    f"{candidate.setup_s:9.3f}  {candidate.epoch_s:8.4g}  {candidate.data_wait_s:.3g} s ({share:.0f}%)"
                )
                lines.append(f"{candidate.name:{width}}  yes   {times}")
        if self.model_alone_s is not None:
            lines.append(f"(the model alone, without loading: {self.model_alone_s:.3g} s)")
        return "\n".join([*lines, f"chosen: {self.name}, {self.reason}"])


@LOADERS.register("auto", AutoOptions)
def auto(options: AutoOptions, data: Data, order: EpochOrder, device: torch.device) -> Loader:
    """The loader that delivers an epoch soonest where no model is at work beside it; prints the table.

    The loader's `choice` is the `Choice`.

    Raises:
        ConfigError: no candidate can be used.
    """
    choice = choose(options, data, order, device, "")
    print(choice.table(), file=sys.stderr)
    loader = LOADERS.build(choice.values, data, order, device)
    loader.choice = choice
    return loader


def _rank(name: str) -> tuple[int, str]:
    """Which of equally fast loaders is to be taken: the simplest, as in `conf/data/loader/auto.yaml`."""
    return (SIMPLEST_FIRST.index(name) if name in SIMPLEST_FIRST else len(SIMPLEST_FIRST)), name


def choose(
    options: AutoOptions,
    data: Data,
    order: EpochOrder,
    device: torch.device,
    key: str = "data.loader",
    new_trial: Callable[[], Trial] | None = None,
    also: Sequence[tuple[Data, EpochOrder]] = (),
) -> Choice:
    """Time the candidates that fit and choose the fastest; among equals, the first.

    Args:
        key: where the options stand in the configuration.
        also: other sets that a loader of the same kind will be built for, whose memory counts too.
        new_trial: makes a fresh model and gives its trial; without one, batches are taken and let go.

    Raises:
        ConfigError: a candidate that is unknown or wrongly configured, or none that can be used.
    """
    candidates: Mapping[str, Any] = options.candidates or {
        name: LOADERS.complete({"name": name}) for name in sorted(LOADERS.names(), key=_rank) if name != "auto"
    }
    for name, values in candidates.items():
        LOADERS.member(values, join(key, f"candidates.{name}"))
        if values["name"] == "auto":
            raise ConfigError(f"{join(key, f'candidates.{name}')}: auto cannot be its own candidate")
    reserve, alone = Memory(), None
    if new_trial and isinstance(data, Arrays) and len(order):
        reserve, alone = _model_alone(options, data, order, device, new_trial)

    def row(name: str, values: Mapping[str, Any]) -> Candidate:
        try:
            # Asked before anything is built, also the model that it is tried with: what is free counts, less its need.
            others = (needs_of(values, *other, device) for other in also)
            check_fits(name, sum(others, needs_of(values, data, order, device)), device, reserve)
            started = time.perf_counter()
            with LOADERS.build(values, data, order, device) as loader:
                setup = time.perf_counter() - started
                seconds, waiting = measure(loader, options, new_trial() if new_trial else partial(consume, device))
        except Exception as error:  # whatever it is, the other candidates may work
            return Candidate(name, refused=str(error) or type(error).__name__)
        return Candidate(name, setup, seconds * len(order), waiting * len(order))

    table = [row(name, values) for name, values in candidates.items()]
    times = {candidate.name: candidate.epoch_s for candidate in table if candidate.epoch_s is not None}
    if not times:
        raise ConfigError("no candidate can be used:\n" + "\n".join(f"{row.name}: {row.refused}" for row in table))
    least = min(times.values())
    name = next(name for name, seconds in times.items() if seconds <= least * (1 + TIE))
    chosen = times[name]
    reason = f"{chosen:.3g} s an epoch expected, "
    if len(times) == 1:
        reason += "the only one that can be used"
    elif chosen == least:
        reason += "the least"
    else:
        reason += f"within {TIE:.0%} of the least ({least:.3g} s) and earlier in the list"
    return Choice(name, dict(candidates[name]), reason, table, alone)


def _model_alone(
    options: AutoOptions, data: Arrays, order: EpochOrder, device: torch.device, new_trial: Callable[[], Trial]
) -> tuple[Memory, float]:
    """The memory that a model needs, and the seconds that an epoch takes it over a batch that is there already."""

    def work() -> float:
        return measure(Resident(data, order, device), options, new_trial())[0]

    memory, seconds = peak_memory(work, device)
    return memory, seconds * len(order)


def measure(loader: Loader, options: AutoOptions, trial: Trial) -> tuple[float, float]:
    """Seconds that a batch takes, and those of them that were spent waiting for it; both zero where there is none."""
    if not len(loader):
        return 0.0, 0.0
    with closing(loader.epoch(0)) as batches:
        together = loader.order.whole
        whole = together.size // together.batch_size or 1  # a short last batch would tell too little
        warm_up = min(WARM_UP, whole - 1)
        seconds = trial(Portion(loader.order, batches, warm_up))[0] if warm_up else 0.0
        affordable = int(options.seconds * warm_up / seconds) if seconds else options.batches
        left = whole - warm_up
        count = min(max(affordable, LEAST), options.batches, left)
        seconds, waiting = trial(Portion(loader.order, batches, count))
        more = min(LEAST_WAITING, left) - count
        if more > 0 and waiting > TIE * seconds:
            further = trial(Portion(loader.order, batches, more))
            seconds, waiting, count = seconds + further[0], waiting + further[1], count + more
    return seconds / count, waiting / count


def consume(device: torch.device, loader: Loader) -> tuple[float, float]:
    """The trial where there is no model: all time is waiting."""
    started = time.perf_counter()
    for _ in loader.epoch(0):
        pass
    synchronize(device)
    seconds = time.perf_counter() - started
    return seconds, seconds


class Portion(Loader):
    """The next few batches of an epoch that is under way."""

    def __init__(self, order: EpochOrder, under_way: Batches, count: int) -> None:
        super().__init__(order)
        self._under_way, self._count = under_way, count

    def __len__(self) -> int:
        return self._count

    def batches(self, number: int, start: int) -> Batches:
        yield from islice(self._under_way, self._count)


class Resident(Loader):
    """One batch that is on the device already, over and over: what the model takes when it never waits."""

    def __init__(self, arrays: Arrays, order: EpochOrder, device: torch.device) -> None:
        super().__init__(order)
        size = min(order.batch_size, order.size)
        self._batch = arrays.images[:size].to(device), arrays.labels[:size].to(device)

    def batches(self, number: int, start: int) -> Batches:
        yield from repeat(self._batch, len(self))
