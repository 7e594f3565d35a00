"""Which runs may be compared, what distinguishes them, and what their figures come to.

A time is worth something beside another only if the machine and the data were the same. So the runs are first divided
into comparisons, one for each machine and data set. Within one, runs of the same configuration are repeats of a cell.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any

from vitmnist.report.runs import Record, Run
from vitmnist.report.swept import swept, title_of, value_of

NOTHING = "–"

# What a machine and its software are called in the report, by their keys in `environment`.
MACHINE = {"cpu": "processor", "cpu_count": "cores", "gpu": "GPU"}
SOFTWARE = {
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
    """The median of some measurements, and their range."""

    median: float
    low: float
    high: float

    def overlaps(self, other: Spread) -> bool:
        """Whether the ranges have something in common, so that the two cannot be told apart."""
        return self.low <= other.high and other.low <= self.high

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """None where nothing was measured."""
        return cls(median(values), min(values), max(values)) if values else None


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

    @property
    def status(self) -> str:
        """What became of its runs: nothing to say, or how many did not complete, and why."""
        ended = [run for run in self.runs if run.status != "completed"]
        remarks = ["resumed"] if any(run.resumed for run in self.runs) else []
        if not ended:
            return ", ".join(["completed", *remarks])
        share = f" {len(ended)} of {len(self.runs)}" if len(self.runs) > 1 else ""
        reasons = list(dict.fromkeys(f"{run.status}{share}: {run.reason}".rstrip(": ") for run in ended))
        return "; ".join([*reasons, *remarks])

    def _over(self, figure: Callable[[Record], float | None]) -> Spread | None:
        figures = [figure(epoch) for run in self.runs for epoch in run.steady_epochs]
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
        """Whether some run has one epoch only, so that its warming up is in the figures."""
        return any(len(run.epochs) == 1 for cell in self.cells for run in cell.runs)

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
        known = [self.facts[key] for key in ("GPU", "processor", "data") if key in self.facts]
        return "; ".join(known) or "machine and data not known"

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
    apart: dict[tuple[Any, ...], list[Run]] = {}
    homes = {run.folder.parent: run for run in runs if run.result.get("environment")}
    for run in runs:
        # A run that never began does not know its machine; it belongs with the others of its sweep.
        known = run if run.result.get("environment") else homes.get(run.folder.parent, run)
        apart.setdefault((*_machine(known, runs), *_data(known)), []).append(run)
    return [_comparison(group) for group in apart.values()]


def _machine(run: Run, runs: Sequence[Run]) -> tuple[Any, ...]:
    """What makes a machine another one. A run on the CPU does not know the GPU beside it."""
    environment = run.result.get("environment") or {}
    processor = (environment.get("cpu"), environment.get("cpu_count"))
    gpu = environment.get("gpu")
    if gpu is None:
        beside = {
            other["gpu"]
            for other in (run.result.get("environment") or {} for run in runs)
            if (other.get("cpu"), other.get("cpu_count")) == processor and other.get("gpu")
        }
        gpu = beside.pop() if len(beside) == 1 else None
    return (*processor, gpu)


def _data(run: Run) -> tuple[Any, ...]:
    dataset = run.result.get("dataset") or {}
    return (dataset.get("name"), *sorted((dataset.get("sha256") or {}).items()))


def _comparison(runs: Sequence[Run]) -> Comparison:
    known = [run for run in runs if run.result.get("environment")]
    software = {
        title: {_fact(run.result["environment"].get(key)): None for run in known} for key, title in SOFTWARE.items()
    }
    differing = [title for title, values in software.items() if len(values) > 1]
    keys = swept([run.config for run in runs])
    titles = {title: key for key, title in SOFTWARE.items()}
    cells: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        environment = run.result.get("environment") or {}
        values = [
            *(value_of(key, run) for key in keys),
            *(_fact(environment.get(titles[title])) for title in differing),
        ]
        cells.setdefault(tuple(values), []).append(run)
    facts = {
        title: ", ".join(dict.fromkeys(_fact(run.result["environment"].get(key)) for run in known))
        for key, title in MACHINE.items()
    }
    facts |= {title: next(iter(values)) for title, values in software.items() if len(values) == 1}
    facts |= _data_facts(known)
    return Comparison(
        columns=(*(title_of(key) for key in keys), *differing),
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
