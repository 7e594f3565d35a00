"""Groups the runs that may be compared, and pairs the rounds of configurations.

Times are comparable only on one machine with the same data, so runs are first divided into comparisons, one for each
machine and data set. Within one, runs that differ in nothing but seed and round are repeats of a configuration. What is
compared are rounds of one sweep (`repeats`), in which every configuration has its turn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any

from vitmnist.report.facts import MACHINE, NOTHING, SOFTWARE, data_facts, fact_of, facts_of
from vitmnist.report.intervals import ERROR, PairedRatio, Spread
from vitmnist.report.overlapping import mark_overlapping
from vitmnist.report.runs import Run
from vitmnist.report.varied_keys import flat_values, title_of, varied_keys

LOADER = "data/loader"

Round = tuple[str, str]  # the folder of the sweep, and `repeat`


@dataclass(frozen=True, eq=False)
class Configuration:
    """A row of the report: its values in the columns, and its runs."""

    values: tuple[Any, ...]
    runs: tuple[Run, ...]

    @cached_property
    def ranked(self) -> dict[Round, list[Run]]:
        """The runs whose times are compared, by round."""
        rounds: dict[Round, list[Run]] = {}
        for run in self.runs:
            if run.is_ranked:
                rounds.setdefault((str(run.folder.resolve().parent), str(run.config.get("repeat"))), []).append(run)
        return rounds

    @property
    def shown(self) -> list[list[Run]]:
        """The runs whose figures are shown, by round: those that are compared, or else all that have an epoch."""
        return list(self.ranked.values()) or [[run] for run in self.runs if run.epochs]

    def spread(self, key: str) -> Spread | None:
        """A figure over the runs, each of which contributes its median epoch."""
        return Spread.of([figures(runs, key) for runs in self.shown])

    @cached_property
    def epoch_s(self) -> Spread | None:
        """Seconds per epoch, evaluation included."""
        return self.spread("epoch_s")

    @cached_property
    def accuracies(self) -> dict[str, float]:
        """Accuracy after the last epoch by seed, in percent, of the runs that completed."""
        completed = [run for run in self.runs if run.status == "completed" and run.epochs]
        # Runs of one seed are no independent samples of an accuracy: the first counts.
        return {
            run.seed: run.epochs[-1]["eval_acc"]
            for run in reversed(completed)
            if run.epochs[-1].get("eval_acc") is not None
        }

    @property
    def accuracy(self) -> Spread | None:
        """Accuracy over the seeds; of what is shown where no run completed."""
        ends = [run.epochs[-1].get("eval_acc") for runs in self.shown for run in runs]
        return Spread.of([[end] for end in [*self.accuracies.values()] or ends if end is not None])

    def seconds_to(self, target: float) -> Spread | None:
        """Seconds until an accuracy was reached, over the completed runs that did."""
        reached = [run.seconds_to(target) for run in self.runs if run.status == "completed" and not run.overlapping]
        return Spread.of([[seconds] for seconds in reached if seconds is not None])

    def peak(self, key: str) -> float | None:
        """The highest value over all epochs of all runs."""
        return max(
            (epoch[key] for run in self.runs for epoch in run.epochs if epoch.get(key) is not None), default=None
        )

    @property
    def status(self) -> str:
        """How its runs ended and why, and why their times are not compared."""
        total = len(self.runs)

        def share(number: int) -> str:
            return f" {number} of {total}" if total > 1 else ""

        ended = Counter((run.status, run.reason) for run in self.runs if run.status != "completed")
        parts = [f"{status}{share(n)}{f': {reason}' if reason else ''}" for (status, reason), n in ended.items()]
        remarks = {
            "resumed": [run.resumed for run in self.runs],
            "overlapping": [run.overlapping for run in self.runs],
            "first epoch only": [run.status == "completed" and len(run.epochs) == 1 for run in self.runs],
            "no epoch after the first of a start": [
                run.status == "completed" and not run.steady and len(run.epochs) > 1 for run in self.runs
            ],
        }
        parts += [f"{remark}{share(sum(which))}" for remark, which in remarks.items() if any(which)]
        return "; ".join(parts if ended else [", ".join(["completed", *parts])])


@dataclass(frozen=True)
class Comparison:
    """Runs of one machine and one data set.

    Args:
        columns: keys of the configuration that differ, and facts of the software that do.
        rows: one for each combination of values in these columns.
        facts: machine, software and data, where they are the same for all.
        error: the rate at which the interval of one pair may miss, so that a report with all its pairs names a
            difference that is none at a rate of at most 5% (Bonferroni).
    """

    columns: tuple[str, ...]
    rows: tuple[Configuration, ...]
    facts: Mapping[str, str]
    error: float = ERROR

    @cached_property
    def ranked(self) -> list[Configuration]:
        """The rows whose times are compared, the one with the lowest median first."""
        return sorted((row for row in self.rows if row.ranked), key=_median_time)

    @property
    def target_acc(self) -> float | None:
        """The accuracy, in percent, that all runs were to reach as soon as possible; None if that was not the aim."""
        aims = [run.config.get("sweep") for row in self.rows for run in row.runs]
        targets = [
            aim.get("target_acc")
            for aim in aims
            if isinstance(aim, Mapping) and aim.get("objective") == "seconds_to_target"
        ]
        is_aim = len(targets) == len(aims) and all(target == targets[0] for target in targets)
        return targets[0] if is_aim and isinstance(targets[0], int | float) and 0 <= targets[0] <= 100 else None

    def value(self, row: Configuration, column: str) -> Any:
        """The value of a row in a column; None where there is no such column."""
        return row.values[self.columns.index(column)] if column in self.columns else None

    def batch_sizes(self) -> list[int]:
        """The batch sizes, ascending, of the rows that have one; none where it does not vary."""
        sizes = {self.value(row, "batch_size") for row in self.rows} - {NOTHING}
        return sorted(sizes) if all(type(size) is int for size in sizes) else []

    def loader_groups(self) -> dict[tuple[tuple[str, Any], ...], list[Configuration]]:
        """Rows that differ in the loader alone, by the columns and values that they share."""
        # A key of one loader alone is no difference to the others.
        shared = [name for name in self.columns if name != LOADER and not name.startswith("data.loader.")]
        groups: dict[tuple[tuple[str, Any], ...], list[Configuration]] = {}
        for row in self.rows:
            groups.setdefault(tuple((name, self.value(row, name)) for name in shared), []).append(row)
        return {key: rows for key, rows in groups.items() if len({self.value(row, LOADER) for row in rows}) > 1}

    def ratio(self, slower: Configuration, faster: Configuration, key: str = "epoch_s") -> PairedRatio | None:
        """How many times as long `slower` takes, over the rounds that both have; None where they have none."""
        pairs = [
            (figures(slower.ranked[number], key), figures(faster.ranked[number], key))
            for number in slower.ranked
            if number in faster.ranked
        ]
        known = [(median(one), median(other)) for one, other in pairs if one and other]
        return PairedRatio.of([one for one, _ in known], [other for _, other in known], self.error)

    def loader_label(self, row: Configuration) -> str:
        """The loader of a row, with its options where they vary."""
        options = [
            f"{column.removeprefix('data.loader.')}={value}"
            for column, value in zip(self.columns, row.values, strict=True)
            if column.startswith("data.loader.") and value != NOTHING
        ]
        return " ".join([str(self.value(row, LOADER)), *options])


def figures(runs: Sequence[Run], key: str) -> list[float]:
    """A figure of each run that has it."""
    return [value for run in runs if (value := run.figure(key)) is not None]


def _median_time(row: Configuration) -> float:
    assert row.epoch_s is not None
    return row.epoch_s.median


def compare(runs: Sequence[Run]) -> list[Comparison]:
    """Divide runs by machine and data set; the order of the runs is kept."""
    runs = mark_overlapping(runs)
    apart: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        known = run if run.environment else _relative(run, runs)
        apart.setdefault(_identity(known), []).append(run)
    groups = [_rows(group) for group in apart.values()]
    counted = [sum(any(run.status == "completed" for run in row.runs) for row in rows) for _, rows, _ in groups]
    pairs = sum(number * (number - 1) // 2 for number in counted)
    return [Comparison(*group, error=ERROR / max(pairs, 1)) for group in groups]


def _relative(run: Run, runs: Sequence[Run]) -> Run:
    """For a run that never began, and does not know its machine: one of its sweep, with the same data if there is."""

    def dataset(one: Run) -> Any:
        data = one.config.get("data")
        return data.get("dataset") if isinstance(data, Mapping) else None

    siblings = [one for one in runs if one.environment and one.folder.parent == run.folder.parent]
    return max(siblings, key=lambda one: bool(dataset(one) == dataset(run)), default=run)


def _identity(run: Run) -> tuple[Any, ...]:
    """What identifies the machine and the data set of a run."""
    dataset = run.result.get("dataset") or {}
    machine = (fact_of(run.environment.get(key)) for key in MACHINE)
    return (*machine, fact_of(dataset.get("name")), *sorted((dataset.get("sha256") or {}).items()))


def _rows(runs: Sequence[Run]) -> tuple[tuple[str, ...], tuple[Configuration, ...], dict[str, str]]:
    """Columns, rows and facts of a comparison."""
    found = [facts_of(run) for run in runs]
    known = [facts for run, facts in zip(runs, found, strict=True) if run.environment]
    configs = [flat_values(run) for run in runs]
    keys = varied_keys(configs)
    differing = [key for key in SOFTWARE if len({facts[key] for facts in known}) > 1 and key not in keys]
    rows: dict[tuple[Any, ...], list[Run]] = {}  # what cannot be read is no repeat of anything: a row for each
    for run, config, facts in zip(runs, configs, found, strict=True):
        values = [*(config.get(key, NOTHING) for key in keys), *(facts[key] for key in differing)]
        own = run.folder if run.status == "unreadable" else None
        rows.setdefault((own, *values), []).append(run)
    shared = {
        title: ", ".join(dict.fromkeys(facts[key] for facts in known if facts[key] != NOTHING))
        for key, title in (MACHINE | SOFTWARE).items()
        if key not in differing
    }
    return (
        (*(title_of(key) for key in keys), *(SOFTWARE[key] for key in differing)),
        tuple(Configuration(tuple(values), tuple(repeats)) for (_, *values), repeats in rows.items()),
        {title: fact for title, fact in (shared | data_facts(runs)).items() if fact},
    )
