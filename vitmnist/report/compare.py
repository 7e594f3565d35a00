"""Which runs may be compared, what distinguishes them, and what their figures come to.

A time is worth something beside another only if the machine and the data were the same. So the runs are first divided
into comparisons, one for each machine and data set. Within one, runs of the same configuration are repeats of a cell.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any

from vitmnist.report.beside import marked
from vitmnist.report.runs import Record, Run
from vitmnist.report.swept import swept, title_of, values_of

NOTHING = "–"

# What a machine and its software are called in the report, by their keys in `environment`.
PLACE = ("GPU", "processor", "cores", "data", "SHA-256")
MACHINE = {"cpu": "processor", "cpu_count": "cores", "gpu": "GPU"}
SOFTWARE = {
    "device": "device",
    "ranks": "processes",
    "placement": "placement of the set",
    "torch_threads": "torch threads",
    "gpu_driver": "driver",
    "platform": "system",
    "python": "Python",
    "torch": "torch",
    "torchvision": "torchvision",
    "cuda": "CUDA",
    "git_commit": "commit",
    "git_dirty": "uncommitted changes",
    "vitmnist": "vitmnist",
}


@dataclass(frozen=True)
class Spread:
    """The median of some measurements, and their range; `sure` is where the median of ever more of them would lie."""

    median: float
    low: float
    high: float
    sure: tuple[float, float]

    def overlaps(self, other: Spread) -> bool:
        """Whether the two cannot be told apart."""
        return self.sure[0] <= other.sure[1] and other.sure[0] <= self.sure[1]

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """None where nothing was measured.

        `sure` is the 95% confidence interval of the median between two order statistics (Conover, Practical
        Nonparametric Statistics, 1999, 3.2), which holds for any distribution. Up to five values it is their range.
        """
        if not values:
            return None
        ordered, number = sorted(values), len(values)
        cut = 0
        while sum(math.comb(number, left) for left in range(cut + 2)) / 2**number <= 0.025:
            cut += 1
        return cls(median(ordered), ordered[0], ordered[-1], (ordered[cut], ordered[-1 - cut]))


@dataclass(frozen=True, eq=False)
class Cell:
    """The runs of one configuration, and their figures over all the epochs that count, of all of them."""

    values: tuple[Any, ...]
    runs: tuple[Run, ...]

    @cached_property
    def epoch_s(self) -> Spread | None:
        """Seconds of an epoch, evaluation included."""
        return self._over(lambda epoch: epoch["epoch_s"])

    @cached_property
    def data_wait_s(self) -> Spread | None:
        """Seconds of an epoch in which the model waited for data."""
        return self._over(lambda epoch: epoch["data_wait_s"])

    @cached_property
    def data_wait_pct(self) -> Spread | None:
        """The same in percent of the training pass."""
        return self._over(lambda epoch: 100 * epoch["data_wait_s"] / epoch["train_s"])

    @cached_property
    def compute_s(self) -> Spread | None:
        """Seconds of an epoch in which the model learnt."""
        return self._over(lambda epoch: epoch["compute_s"])

    @cached_property
    def images_per_s(self) -> Spread | None:
        """Training images a second."""
        return self._over(lambda epoch: epoch["images_per_s"])

    @cached_property
    def gpu_util_pct(self) -> Spread | None:
        """How busy the GPU was, in percent."""
        return self._over(lambda epoch: epoch.get("gpu_util_pct"))

    @cached_property
    def host_peak_mib(self) -> float | None:
        """Peak memory of the process, the highest of all runs."""
        return self._peak("host_peak_mib")

    @cached_property
    def gpu_peak_mib(self) -> float | None:
        """Peak memory of tensors on the GPU, the highest of all runs."""
        return self._peak("gpu_peak_mib")

    @cached_property
    def val_acc(self) -> Spread | None:
        """Accuracy at the end of the runs that came to their end, in percent."""
        return Spread.of([run.epochs[-1]["val_acc"] for run in self.runs if run.status == "completed" and run.epochs])

    def seconds_to(self, target: float) -> Spread | None:
        """Seconds until a run reached an accuracy, over the runs that did."""
        reached = [run.seconds_to(target) for run in self.runs]
        return Spread.of([seconds for seconds in reached if seconds is not None])

    @cached_property
    def counted(self) -> list[Record]:
        """The epochs that count: without the first of each run, which warms up, unless no run has another."""
        steady = [epoch for run in self.runs for epoch in run.epochs[1:]]
        return steady or [epoch for run in self.runs for epoch in run.epochs]

    @property
    def disturbed(self) -> bool:
        """Whether its times are those of runs beside other ones."""
        return any(run.disturbed for run in self.runs)

    @property
    def status(self) -> str:
        """What became of its runs: nothing to say, or how many did not complete, and why."""
        remarks = ["resumed"] if any(run.resumed for run in self.runs) else []
        remarks += ["disturbed"] if self.disturbed else []
        ended = Counter((run.status, run.reason) for run in self.runs if run.status != "completed")
        if not ended:
            return ", ".join(["completed", *remarks])
        parts = []
        for (status, reason), number in ended.items():
            share = f" {number} of {len(self.runs)}" if len(self.runs) > 1 else ""
            parts.append(f"{status}{share}: {reason}" if reason else f"{status}{share}")
        return "; ".join([*parts, *remarks])

    def _over(self, figure: Callable[[Record], float | None]) -> Spread | None:
        figures = [figure(epoch) for epoch in self.counted]
        return Spread.of([value for value in figures if value is not None])

    def _peak(self, key: str) -> float | None:
        return max(
            (epoch[key] for run in self.runs for epoch in run.epochs if epoch.get(key) is not None), default=None
        )


@dataclass(frozen=True)
class Comparison:
    """Runs of one machine and one data set.

    Args:
        columns: what distinguishes them: keys of the configuration, and facts of the software that were not the same.
        cells: one for each combination of values in these columns.
        facts: machine, software and data, where they are the same for all.
    """

    columns: tuple[str, ...]
    cells: tuple[Cell, ...]
    facts: Mapping[str, str]

    @property
    def measured(self) -> list[Cell]:
        """The cells that have a time, the fastest first."""
        return sorted((cell for cell in self.cells if cell.epoch_s), key=_time)

    @property
    def slowest(self) -> float | None:
        """The epoch time of the slowest cell."""
        return max(map(_time, self.measured), default=None)

    @property
    def first_epochs_count(self) -> bool:
        """Whether a cell has but first epochs, so that warming up is in its figures."""
        return any(cell.counted and all(len(run.epochs) < 2 for run in cell.runs) for cell in self.cells)

    @property
    def repeated(self) -> bool:
        """Whether some configuration was run more than once."""
        return any(len(cell.runs) > 1 for cell in self.cells)

    @property
    def disturbed(self) -> int:
        """How many runs were at work beside another one."""
        return sum(run.disturbed for cell in self.cells for run in cell.runs)

    @property
    def sharded(self) -> bool:
        """Whether a run's set lay in parts on several devices, so that its batches were others."""
        together = (run.result.get("distributed") or {} for cell in self.cells for run in cell.runs)
        return any(how.get("placement") == "shard" for how in together)

    @property
    def target_acc(self) -> float | None:
        """The accuracy, in percent, that all runs were to reach as soon as possible; None if that was not the aim."""
        aims = [run.config.get("sweep") or {} for cell in self.cells for run in cell.runs]
        targets = {aim.get("target_acc") for aim in aims}
        sought = all(aim.get("objective") == "seconds_to_target" for aim in aims)
        return targets.pop() if sought and len(targets) == 1 else None

    def batch_sizes(self) -> list[int]:
        """The batch sizes that were swept, ascending; none where they were not, or are not all known."""
        if "batch_size" not in self.columns:
            return []
        sizes = {self.value(cell, "batch_size") for cell in self.cells}
        return sorted(sizes) if all(isinstance(size, int) for size in sizes) else []

    def loader_by_batch_size(self) -> bool:
        """Whether loader and batch size are what was swept, and nothing else."""
        return set(self.columns) == {"data/loader", "batch_size"} and bool(self.batch_sizes())

    def place(self) -> str:
        """Machine and data, in a line."""
        facts = {**self.facts, "SHA-256": self.facts.get("SHA-256", "").partition(",")[0]}  # that of the images
        return ", ".join(facts[key] for key in PLACE if facts.get(key)) or "machine and data not known"

    def value(self, cell: Cell, column: str) -> Any:
        """What a cell has in a column."""
        return cell.values[self.columns.index(column)]


def as_text(value: Any) -> str:
    """A value of a configuration for people: a float with four digits, where it has more than eight."""
    return f"{value:.4g}" if isinstance(value, float) and len(str(value)) > 8 else str(value)


def _time(cell: Cell) -> float:
    assert cell.epoch_s is not None
    return cell.epoch_s.median


def compare(runs: Sequence[Run]) -> list[Comparison]:
    """Divide runs by machine and data set; the order of the runs is kept."""
    runs = marked(runs)
    apart: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        known = run if run.result.get("environment") else _relative(run, runs)
        apart.setdefault((*_machine(known, runs), *_data(known)), []).append(run)
    return [_comparison(group) for group in apart.values()]


def _relative(run: Run, runs: Sequence[Run]) -> Run:
    """For a run that never began, and does not know its machine: one of its sweep, with the same data if there is."""
    beside = [one for one in runs if one.result.get("environment") and one.folder.parent == run.folder.parent]

    def same_data(one: Run) -> bool:
        return bool(_dataset(one) == _dataset(run))

    return max(beside, key=same_data, default=run)


def _dataset(run: Run) -> Any:
    return run.config["data"].get("dataset") if isinstance(run.config.get("data"), Mapping) else None


def _environment(run: Run) -> dict[str, Any]:
    """Where and with what a run ran, the device included; empty where it is not known."""
    environment = run.result.get("environment")
    together = run.result.get("distributed") or {}
    return {**environment, **together, "device": run.result.get("device")} if environment else {}


def _machine(run: Run, runs: Sequence[Run]) -> tuple[Any, ...]:
    """What makes a machine another one. A run on the CPU does not know the GPU beside it."""
    environment = _environment(run)
    processor = (environment.get("cpu"), environment.get("cpu_count"))
    gpu = environment.get("gpu")
    if gpu is None:
        beside = {
            other["gpu"]
            for other in map(_environment, runs)
            if (other.get("cpu"), other.get("cpu_count")) == processor and other.get("gpu")
        }
        gpu = beside.pop() if len(beside) == 1 else None
    return (*processor, gpu)


def _data(run: Run) -> tuple[Any, ...]:
    dataset = run.result.get("dataset") or {}
    return (dataset.get("name"), *sorted((dataset.get("sha256") or {}).items()))


def _comparison(runs: Sequence[Run]) -> Comparison:
    known = [run for run in runs if run.result.get("environment")]
    found = {
        key: list(dict.fromkeys(_fact(_environment(run).get(key)) for run in known)) for key in (*MACHINE, *SOFTWARE)
    }
    configs = [values_of(run) for run in runs]
    keys = swept(configs)
    differing = [key for key in SOFTWARE if len(found[key]) > 1 and key not in keys]
    cells: dict[tuple[Any, ...], list[Run]] = {}
    for run, config in zip(runs, configs, strict=True):
        values = [
            *(config.get(key, NOTHING) for key in keys),
            *(_fact(_environment(run).get(key)) for key in differing),
        ]
        cells.setdefault(tuple(values), []).append(run)
    facts = {title: ", ".join(fact for fact in found[key] if fact != NOTHING) for key, title in MACHINE.items()}
    facts |= {title: found[key][0] for key, title in SOFTWARE.items() if len(found[key]) == 1}
    facts |= _data_facts(known)
    return Comparison(
        columns=(*(title_of(key) for key in keys), *(SOFTWARE[key] for key in differing)),
        cells=tuple(Cell(values, tuple(repeats)) for values, repeats in cells.items()),
        facts={title: fact for title, fact in facts.items() if fact and fact != NOTHING},
    )


def _data_facts(known: Sequence[Run]) -> dict[str, str]:
    for run in known:
        if dataset := run.result.get("dataset"):
            sums = ", ".join(f"{name} {value[:12]}" for name, value in dataset["sha256"].items())
            sizes = f"{dataset['train_size']:,} training and {dataset['test_size']:,} test images"
            return {"data": f"{dataset['name']}, {sizes}", "SHA-256": f"{sums} (first 12 digits)"}
    return {}


def _fact(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str) and len(value) == 40 and value.isalnum():  # a commit
        return value[:12]
    return NOTHING if value is None else str(value)
