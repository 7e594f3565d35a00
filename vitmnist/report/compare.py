"""Configurations of one machine and dataset, and how their times compare.

Configurations are compared over the rounds of a sweep (`repeats`), in each of which every configuration runs: whatever
slows a whole round down cancels in the ratio.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any

from vitmnist.report.statistics import Ratio, Spread, compare_all
from vitmnist.tracking.epoch_table import Metric, epoch_metrics
from vitmnist.tracking.runs import Run, monitored

LOADER = "data/loader"
OPTION = "data.loader."
NOTHING = "–"  # not measured, or not applicable


def quality_title(metric: Metric) -> str:
    """`accuracy`: a metric without its unit; by its name if it has no column."""
    return (metric.column or metric.name).partition(",")[0]


def quality_text(metric: Metric, value: float) -> str:
    """`97.10%` or `0.1234`."""
    return f"{value:.{4 if metric.digits is None else metric.digits}f}{'%' * (metric.unit == '%')}"


def overrides(values: Mapping[str, Any]) -> str:
    """Keys and values as on the command line: `data/loader=ram batch_size=500`."""
    return " ".join(f"{key}={value}" for key, value in values.items())


@dataclass(frozen=True, eq=False)
class Configuration:
    """A row of the report: its values in the columns that vary, and its runs."""

    values: dict[str, Any]
    runs: list[Run]

    @property
    def label(self) -> str:
        """Its values as overrides."""
        return overrides(self.values)

    @cached_property
    def rounds(self) -> dict[tuple[str, str], list[Run]]:
        """The ranked runs by round: folder of the sweep, and `repeat`. Empty if no time of this row is compared."""
        rounds: dict[tuple[str, str], list[Run]] = {}
        for run in self.runs:
            if run.is_ranked:
                key = str(run.folder.resolve().parent), str(run.config.get("repeat"))
                rounds.setdefault(key, []).append(run)
        return rounds

    def spread(self, name: str) -> Spread | None:
        """A metric over the ranked runs (over all runs, if none is ranked), or its final value over the seeds."""
        if epoch_metrics()[name].over_epochs == "last" and (quality := self.quality(name)):
            return quality
        ranked = [run for runs in self.rounds.values() for run in runs]
        return Spread.of(_values(ranked or self.runs, name))

    @cached_property
    def epoch_s(self) -> Spread | None:
        """Seconds per epoch, evaluation included."""
        return self.spread("epoch_s")

    def by_seed(self, name: str) -> dict[tuple[str, str], float]:
        """A metric of quality by seed and fold. Runs with the same ones are not independent: the first one counts."""
        runs = [run for run in reversed(self.runs) if run.status == "completed"]
        return {run.seeds: value for run in runs if (value := run.quality(name)) is not None}

    def quality(self, name: str) -> Spread | None:
        """A metric of quality over the seeds and folds."""
        return Spread.of(list(self.by_seed(name).values()))

    @property
    def status(self) -> str:
        """How its runs ended and why, and why their times are not compared, with numbers of runs if they differ."""
        states = Counter(run.state for run in self.runs)
        return "; ".join(f"{count} {state}" if len(states) > 1 else state for state, count in states.items())


@dataclass(frozen=True)
class Comparison:
    """Runs of one machine and one dataset.

    Args:
        columns: the configuration keys that vary, then the facts about the software that vary.
        rows: one for each combination of their values.
        facts: machine, software and data that all runs have in common, by title.
    """

    columns: Sequence[str]
    rows: Sequence[Configuration]
    facts: Mapping[str, str]

    @cached_property
    def ranked(self) -> list[Configuration]:
        """The rows whose times are compared, lowest median first."""
        timed = [row for row in self.rows if row.rounds and row.epoch_s]
        return sorted(timed, key=lambda row: row.epoch_s.median)  # type: ignore[union-attr]

    @cached_property
    def ratios(self) -> dict[tuple[Configuration, Configuration], Ratio]:
        """How many times as long an epoch of a ranked row takes as one of another, if they have a common round."""
        # Runs of several seeds in a round share the state of the machine: they count as one.
        times = {
            row: {key: median(_values(runs, "epoch_s")) for key, runs in row.rounds.items()} for row in self.ranked
        }
        return compare_all(times)

    def to_fastest(self, row: Configuration) -> Ratio | None:
        """The ratio of a row to the one with the lowest median; None for that row, and without a common round."""
        return self.ratios.get((row, self.ranked[0])) if self.ranked else None

    @cached_property
    def metric(self) -> Metric:
        """The metric that the runs monitor."""
        return monitored(run for row in self.rows for run in row.runs)

    @cached_property
    def by_quality(self) -> list[tuple[dict[tuple[str, str], float], list[Configuration]]]:
        """The values of the metric by seed and fold, the best median first, and the rows that have them.

        Rows that agree in their common seeds are together: loaders deliver identical batches, and repeat no quality.
        """
        groups: list[tuple[dict[tuple[str, str], float], list[Configuration]]] = []
        for row in self.rows:
            values = row.by_seed(self.metric.name)
            for known, rows in groups:
                common = known.keys() & values.keys()
                if common and all(known[seed] == values[seed] for seed in common):
                    known.update(values)
                    rows.append(row)
                    break
            else:
                groups += [(values, [row])] if values else []
        best_first = self.metric.direction == "max"
        return sorted(groups, key=lambda group: median(group[0].values()), reverse=best_first)

    @cached_property
    def block(self) -> str:
        """In what repeats of a configuration differ: `seed`, `fold` (`data.holdout_seed`), or `run` if in both."""
        pairs = {run.seeds for row in self.rows for run in row.runs if run.config}
        seeds, folds = ({pair[part] for pair in pairs} for part in (0, 1))
        return "seed" if len(folds) < 2 else "fold" if len(seeds) < 2 else "run"

    @property
    def differs(self) -> bool:
        """Whether the metric differs between rows."""
        return len(self.by_quality) > 1

    @cached_property
    def ordered(self) -> list[Configuration]:
        """The rows as table and chart show them: by quality, batch size, whether they are ranked, and time."""
        rank = {row: number for number, (_, rows) in enumerate(self.by_quality) for row in rows} if self.differs else {}

        def key(row: Configuration) -> tuple[float, ...]:
            size, time = row.values.get("batch_size"), row.epoch_s
            known = not time, size if isinstance(size, int) else 0, not row.rounds, time.median if time else 0.0
            return rank.get(row, len(rank)), *known

        return sorted(self.rows, key=key)

    @property
    def machine_and_data(self) -> str:
        """Machine and data in one line."""
        known = (self.facts.get(title) for title in ("gpu", "cpu", "host", "data"))
        return ", ".join(filter(None, known)) or "unknown machine and data"


def _values(runs: Iterable[Run], name: str) -> list[float]:
    return [value for run in runs if (value := run.value(name)) is not None]
