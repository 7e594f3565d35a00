"""Divides runs into comparisons, one for each machine and dataset, and groups the repeats of a configuration.

Any configuration key and any fact about the software that varies is a column. Configurations are compared over the
rounds of a sweep (`repeats`). Every configuration runs once in each round, so whatever slows a whole round down cancels
in the ratio.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from vitmnist.config.schema import affects_nothing, is_under, keys_where
from vitmnist.metrics.epoch_record import summarize
from vitmnist.metrics.epoch_table import EPOCH_S, Metric, epoch_metrics
from vitmnist.report.statistics import Difference, Differences
from vitmnist.timing.table import Spread
from vitmnist.tracking.result import TEST_ACC, Run, monitored

EMPTY_CELL = "–"
"""The text of a cell whose value was not measured, or does not apply."""
LOADER = "data/loader"
"""The column of the loader."""
LOADER_OPTION = "data.loader."
"""The columns of the loader's options begin so."""
CHECKSUMS = "SHA-256 of the data"
"""The title of the checksums of a dataset. Hold-outs of one dataset have them in common."""
IDENTITY = ("host", "cpu", "cpu count", CHECKSUMS)
"""The facts that two runs which are compared have in common."""


def _overrides(values: Mapping[str, object]) -> str:
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
        return _overrides(self.values)

    @property
    def without_loader(self) -> str:
        """Its values as overrides, without the loader and its options."""
        shared = [key for key in self.values if key != LOADER and not key.startswith(LOADER_OPTION)]
        return _overrides({key: self.values[key] for key in shared})

    @property
    def loader(self) -> str:
        """Its loader, with the options that vary: `disk (num_workers=2)`."""
        name = str(self.values.get(LOADER, ""))
        options = [f"{key}={value}" for key, value in self.values.items() if key.startswith(LOADER_OPTION)]
        text = ", ".join(option.removeprefix(LOADER_OPTION) for option in options)
        return f"{name} ({text})" if name and text else name or text

    @cached_property
    def rounds(self) -> dict[str, list[Run]]:
        """The ranked runs by round: folder of the sweep, and `repeat`. Empty if no time of this row is compared."""
        rounds: dict[str, list[Run]] = {}
        for run in self.runs:
            if run.is_ranked:
                rounds.setdefault(f"{run.folder.resolve().parent} {run.config.get('repeat')}", []).append(run)
        return rounds

    @cached_property
    def spreads(self) -> dict[str, Spread | None]:
        """Each metric of an epoch and the test accuracy; None where it was not measured.

        Metrics of quality are over the seeds, others over the ranked runs, or over all runs if none is ranked.
        """
        ranked = [run for runs in self.rounds.values() for run in runs]
        spreads: dict[str, Spread | None] = {}
        for name, metric in epoch_metrics().items():
            quality = self.quality(name) if metric.over_epochs == "last" else None
            spreads[name] = quality or _spread(_values(ranked or self.runs, metric))
        return spreads | {TEST_ACC: self.quality(TEST_ACC)}

    @property
    def epoch_s(self) -> Spread | None:
        """Seconds per epoch, evaluation included."""
        return self.spreads[EPOCH_S.name]

    def by_seed(self, name: str) -> dict[str, float]:
        """A metric of quality by seed. Runs with the same one are not independent: the first one counts."""
        runs = [run for run in reversed(self.runs) if run.status == "completed"]
        return {run.seeds: value for run in runs if (value := run.quality(name)) is not None}

    def quality(self, name: str) -> Spread | None:
        """A metric of quality over the seeds."""
        return _spread(self.by_seed(name).values())

    @property
    def status(self) -> str:
        """How its runs ended and why, and why their times are not compared, with numbers of runs if they differ."""
        counts = Counter(run.status_text for run in self.runs)
        if len(counts) == 1:
            return next(iter(counts))
        return "; ".join(f"{count} {text}" for text, count in counts.items())


def loader_groups(rows: Iterable[Configuration]) -> dict[str, list[Configuration]]:
    """Rows that differ only in the loader and its options, by what they share."""
    groups: dict[str, list[Configuration]] = {}
    for row in rows:
        groups.setdefault(row.without_loader, []).append(row)
    return groups


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
        timed = [(row.epoch_s.median, row) for row in self.rows if row.rounds and row.epoch_s]
        return [row for _, row in sorted(timed, key=lambda pair: pair[0])]

    @cached_property
    def _ratios(self) -> Differences[Configuration]:
        """The ratios of the seconds per epoch, over the rounds."""
        # Runs of several seeds in a round share the state of the machine: they count as one.
        times = {row: {key: median(_values(runs, EPOCH_S)) for key, runs in row.rounds.items()} for row in self.ranked}
        return Differences(times, as_ratios=True)

    def ratio(self, row: Configuration, other: Configuration | None = None) -> Difference | None:
        """How many times as long an epoch of a row takes as an epoch of another row.

        None if they are the same, if either is not ranked, and without a common round.

        Args:
            other: by default the row with the lowest median.
        """
        return self._ratios.get(row, other or self.ranked[0]) if self.ranked else None

    @cached_property
    def metric(self) -> Metric:
        """The metric that the runs monitor."""
        return monitored(run for row in self.rows for run in row.runs)

    @cached_property
    def by_quality(self) -> dict[str, dict[str, float]]:
        """The values of the metric by seed for each `loader_groups`, the best median first.

        Loaders deliver identical batches, and repeat no quality.
        """
        groups: dict[str, dict[str, float]] = {}
        for shared, rows in loader_groups(self.rows).items():
            values: dict[str, float] = {}
            for row in reversed(rows):
                values |= row.by_seed(self.metric.name)
            if values:
                groups[shared] = values
        best_first = sorted(groups.items(), key=lambda group: -self.metric.sign * median(group[1].values()))
        return dict(best_first)

    @property
    def differs(self) -> bool:
        """Whether the metric differs between rows."""
        return len({median(values.values()) for values in self.by_quality.values()}) > 1

    @cached_property
    def ordered(self) -> list[Configuration]:
        """The rows as table and chart show them: the best quality first, then the lowest time of those ranked."""
        rank = {shared: index for index, shared in enumerate(self.by_quality)} if self.differs else {}

        def key(row: Configuration) -> tuple[float, ...]:
            time = row.epoch_s.median if row.epoch_s else math.inf
            return rank.get(row.without_loader, len(rank)), not row.rounds, time

        return sorted(self.rows, key=key)

    @property
    def machine_and_data(self) -> str:
        """Machine and data in one line."""
        facts = (self.facts.get(title) for title in ("gpu", "cpu", "host", "data"))
        return ", ".join(filter(None, facts)) or "unknown machine and data"


def compare(runs: Sequence[Run]) -> list[Comparison]:
    """Divide runs by machine and dataset. The order of the runs is kept."""
    overlapping = _overlapping(runs)
    runs = [replace(run, overlapping=run.folder in overlapping) for run in runs]
    of_sweep = {run.folder.parent: facts for run in reversed(runs) if (facts := _facts(run))}
    groups: dict[tuple[str | None, ...], list[Run]] = defaultdict(list)
    for run in runs:
        # A run that never started is listed with the other runs of its sweep.
        facts = _facts(run) or of_sweep.get(run.folder.parent, {})
        groups[tuple(facts.get(title) for title in IDENTITY)].append(run)
    return [_comparison(group) for group in groups.values()]


def _overlapping(runs: Iterable[Run]) -> set[Path]:
    """The folders of the runs that were active at the same time as another run on their host."""
    by_host: dict[str, list[Run]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: run.result.began_at):
        if host := (run.result.environment or {}).get("host"):
            by_host[str(host)].append(run)
    folders: set[Path] = set()
    for first, *others in by_host.values():
        last_to_end = first
        for run in others:
            if run.result.began_at < (last_to_end.result.ended_at or 0.0):
                folders |= {run.folder, last_to_end.folder}
            last_to_end = max(last_to_end, run, key=lambda run: run.result.ended_at or 0.0)
    return folders


def _comparison(runs: Sequence[Run]) -> Comparison:
    configs = [_displayed_config(run) for run in runs]
    facts_by_run = [_facts(run) for run in runs]
    common = {title: text for facts in facts_by_run for title, text in facts.items()}
    started = [facts for facts in facts_by_run if facts]
    varied = [title for title in common if len({facts.get(title) for facts in started}) > 1]
    columns = {key: _typed_key(key) for key in _varied_keys(configs)}
    rows: dict[str, Configuration] = {}
    for run, config, facts in zip(runs, configs, facts_by_run, strict=True):
        values = {title: config[key] for key, title in columns.items() if key in config}
        values |= {title: facts[title] for title in varied if title in facts}
        rows.setdefault(repr(values), Configuration(values, [])).runs.append(run)
    common = {title: text for title, text in common.items() if title not in varied}
    return Comparison([*columns.values(), *varied], list(rows.values()), common)


def _typed_key(key: str) -> str:
    """A key as it is typed: a config group with slashes, any other key with dots."""
    return key.removesuffix(".name").replace(".", "/") if key.endswith(".name") else key


def _displayed_config(run: Run) -> dict[str, Any]:
    """The configuration with the loader as the report names it: `prefetch of ram`; `auto: ram` if `auto` chose it."""
    config = dict(run.config)
    loader, base = config.get("data.loader.name"), config.pop("data.loader.base.name", None)
    if base:
        config["data.loader.name"] = f"{loader} of {base}"
    elif run.result.auto:
        config["data.loader.name"] = f"auto: {run.result.auto.get('name')}"
    return config


def _varied_keys(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys whose values vary among configurations, apart from seeds and round.

    An option of a group counts only if it varies among runs of the same member: `num_workers`, which only `disk` has,
    does not distinguish `disk` from `ram`.
    """
    varied = []
    skipped = [*keys_where(affects_nothing), "seed", "data.holdout_seed"]
    for key in dict.fromkeys(key for config in configs for key in config):
        parts = key.split(".")
        groups = [".".join([*parts[:depth], "name"]) for depth in range(1, len(parts))]
        values: dict[str, set[str]] = defaultdict(set)
        # A run whose configuration is unknown distinguishes nothing.
        for config in filter(None, configs):
            members = [config.get(name) for name in groups if name != key]
            values[repr(members)].add(repr(config.get(key)))
        if any(len(different) > 1 for different in values.values()) and not is_under(key, skipped):
            varied.append(key)
    return varied


def _facts(run: Run) -> dict[str, str]:
    """Machine, software and data of a run, by title, without what does not apply; empty if it never started."""
    environment = run.result.environment
    if not environment:
        return {}
    dataset = run.result.dataset or {}
    sizes = {key.removesuffix("_size"): size for key, size in dataset.items() if key.endswith("_size")}
    images = ", ".join(f"{fact_text(size)} {split}" for split, size in sizes.items())
    facts = {
        **environment,
        "device": run.result.device,
        "processes": (run.result.distributed or {}).get("ranks"),
        "data": f"{fact_text(dataset.get('name'))}, images: {images}" if dataset else None,
        CHECKSUMS: dataset.get("folds_of") or dataset.get("sha256"),
    }
    return {title.replace("_", " "): fact_text(value) for title, value in facts.items() if value not in (None, {})}


def fact_text(value: object) -> str:
    """A value of `environment` or `dataset`; commits and checksums are cut to 12 digits."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={fact_text(item)}" for key, item in sorted(value.items()))
    if isinstance(value, str) and len(value) in (40, 64) and value.isalnum():
        return value[:12]
    if type(value) is int:
        return f"{value:,}"
    return str(value)


def _values(runs: Iterable[Run], metric: Metric) -> list[float]:
    """A metric of each run that has measured it."""
    return [value for run in runs if (value := summarize(run.result.epochs, metric)) is not None]


def _spread(values: Collection[float]) -> Spread | None:
    return Spread.of(values) if values else None
