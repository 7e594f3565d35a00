"""Groups runs by machine and dataset, and repeated runs by configuration.

Configurations are compared over the rounds of a sweep (`repeats`). Each configuration runs once per round, so anything
that slows a whole round cancels in the ratio.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean, median
from typing import Any

from vitmnist.config import is_under
from vitmnist.config.schema import IGNORED_KEYS, flatten_keys
from vitmnist.metrics.epoch_table import EPOCH_S, EpochMetric, build_epoch_table
from vitmnist.report.statistics import ConfidenceInterval, PairwiseComparison
from vitmnist.timing.table import Spread
from vitmnist.tracking.result import RunMetric
from vitmnist.tracking.runs import Run, build_run_table

EMPTY_CELL = "–"
"""The text of a cell without a value."""
LOADER, LOADER_OPTION = "data/loader", "data.loader."
"""The title of the column for the loader, and the prefix of the titles of columns for its options."""
DATA_CHECKSUM = "SHA-256 of the data"
"""The title of the checksum of a dataset. All hold-outs of a dataset share one checksum."""
COMPARABILITY_FACTS = ("host", "cpu", "cpu count", DATA_CHECKSUM)
"""The titles of the facts that must be equal for two runs to be compared."""
COLUMN_FACTS = (
    *("platform", "python", "vitmnist", "torch", "torchvision", "hydra-core", "omegaconf", "einops", "numpy"),
    *("tensorboard", "cuda", "cpu capability", "torch threads", "gpu", "resolved device", "processes", "data"),
)
"""The titles of the other facts that become a column if they vary."""


@dataclass(frozen=True, eq=False)
class ReportRow:
    """A row of the report: the runs with the same values in the columns that vary."""

    values: dict[str, Any]
    names: Mapping[str, str]  # The short name of each column, from `shorten_columns`.
    runs: list[Run]

    @property
    def label(self) -> str:
        """The values by short names: `loader=ram batch_size=500`."""
        return self._format(self.values)

    @property
    def label_without_loader(self) -> str:
        return self._format(key for key in self.values if not key.startswith((LOADER, LOADER_OPTION)))

    @property
    def loader(self) -> str:
        """The loader, with the options that vary: `disk num_workers=2`."""
        text = self._format(key for key in self.values if key.startswith((LOADER, LOADER_OPTION)))
        return text.removeprefix(f"{self.names.get(LOADER)}=")

    def _format(self, keys: Iterable[str]) -> str:
        return " ".join(f"{self.names[key]}={self.values[key]}" for key in keys)

    @cached_property
    def rounds(self) -> dict[str, list[Run]]:
        """The timed runs by round: the folder of the sweep, and `repeat`."""
        rounds: dict[str, list[Run]] = defaultdict(list)
        for run in self.runs:
            if run.is_timed:
                rounds[f"{run.folder.resolve().parent} {run.config.get('repeat')}"].append(run)
        return dict(rounds)

    @cached_property
    def spreads(self) -> dict[str, Spread | None]:
        """The spread over the rounds of each metric that is not a quality; None where it was not measured.

        The runs of a round share the state of the machine; runs that are not timed count as a single round.
        """
        rounds = self.rounds.values() or [self.runs]
        names = [name for name, metric in build_run_table().items() if not metric.depends_on_weights]
        medians = {name: [median(values) for runs in rounds if (values := _measured(runs, name))] for name in names}
        return {name: Spread.of(values) if values else None for name, values in medians.items()}

    @property
    def epoch_s(self) -> Spread | None:
        """Seconds per epoch, evaluation included."""
        return self.spreads[EPOCH_S.name]

    @property
    def median_s(self) -> float:
        """The median of `epoch_s`; infinite if it was not measured."""
        return self.epoch_s.median if self.epoch_s else math.inf

    @cached_property
    def runs_by_seed(self) -> dict[str, Run]:
        """The completed runs by seed. Runs with equal seeds are not independent, so only the first counts."""
        return {run.seed_overrides: run for run in reversed(self.runs) if run.result.status == "completed"}

    def quality_by_seed(self, name: str) -> dict[str, float]:
        """A metric of quality by seed."""
        return {seeds: value for seeds, run in self.runs_by_seed.items() if (value := run.value_of(name)) is not None}

    @property
    def status(self) -> str:
        """The status of the runs; if they differ, each status with its number of runs."""
        counts = Counter(run.status_text for run in self.runs)
        return "; ".join(f"{count} {text}" if len(counts) > 1 else text for text, count in counts.items())


def round_floats(text: str) -> str:
    """Round long floats of the configuration to three significant digits; two labels can then be equal."""
    return re.sub(r"\d+\.\d{6,}(e-\d+)?", lambda number: f"{float(number[0]):.3g}", text)


def shorten_columns(columns: Iterable[str]) -> dict[str, str]:
    """Return the last part of each key: `lr` for `optimizer.lr`; the whole key if two have the same last part."""
    short = {column: re.split("[./]", column)[-1] for column in columns}
    counts = Counter(short.values())
    return {column: name if counts[name] == 1 else column for column, name in short.items()}


@dataclass(frozen=True)
class Comparison:
    """The runs of one machine and one dataset."""

    columns: Sequence[str]  # The configuration keys that vary, then the facts about the software that vary.
    rows: Sequence[ReportRow]
    facts: Mapping[str, str]  # Machine, software and data that all runs have in common, by title.

    @property
    def runs(self) -> list[Run]:
        return [run for row in self.rows for run in row.runs]

    @cached_property
    def timed_rows(self) -> list[ReportRow]:
        """The rows with times to compare, lowest median first."""
        return sorted((row for row in self.rows if row.rounds), key=lambda row: row.median_s)

    @cached_property
    def _ratios(self) -> PairwiseComparison[ReportRow]:
        times: dict[ReportRow, dict[str, float]] = {}
        for row in self.timed_rows:
            times[row] = {name: median(_measured(runs, EPOCH_S.name)) for name, runs in row.rounds.items()}
        return PairwiseComparison(times, as_ratios=True)

    @cached_property
    def time_groups(self) -> dict[str, list[ReportRow]]:
        """The timed rows to compare, fastest first, by setting; under an empty name if no setting has two loaders."""
        groups: dict[str, list[ReportRow]] = defaultdict(list)
        for row in self.sorted_rows:
            if row.rounds:
                groups[row.label_without_loader].append(row)
        if groups and all(len(rows) == 1 for rows in groups.values()):
            groups = {"": self.timed_rows}
        return {setting: self._rank(rows) for setting, rows in groups.items()}

    def _rank(self, rows: Sequence[ReportRow]) -> list[ReportRow]:
        """Sort by the times in common rounds, and rows with too few of them last; `rows` is sorted by `median_s`."""
        reference = max(rows, key=lambda row: len(row.rounds))
        ratios = {row: self._ratios.compare(row, reference) for row in rows}
        means = {row: ratio.mean if ratio else math.inf for row, ratio in ratios.items()} | {reference: 1.0}
        return sorted(rows, key=means.__getitem__)

    @cached_property
    def baselines(self) -> dict[ReportRow, ReportRow]:
        """The fastest row of the group of each timed row."""
        return {row: rows[0] for rows in self.time_groups.values() for row in rows}

    def ratio_to_baseline(self, row: ReportRow) -> ConfidenceInterval | None:
        """The epoch time of a row divided by the epoch time of its baseline, over the rounds that both have.

        None if the row is the baseline, or if they have fewer than three rounds in common.
        """
        return self._ratios.compare(row, self.baselines[row]) if row in self.baselines else None

    @cached_property
    def metric(self) -> EpochMetric:
        """The metric that the runs monitor; the accuracy if they monitor several metrics or an unregistered one."""
        metrics = {run.monitored_metric for run in self.runs if run.config}
        return (metrics.pop() if len(metrics) == 1 else None) or build_epoch_table()["eval_acc"]

    def title(self, metric: EpochMetric | RunMetric) -> str:
        """Name a metric, with the split that it was measured on: `validation accuracy, %`."""
        if not metric.name.startswith("eval_") or not metric.depends_on_weights:
            return metric.column or metric.name
        return f"{self.eval_split} {metric.column or metric.name.removeprefix('eval_')}"

    @cached_property
    def eval_split(self) -> str:
        """The split that each epoch was evaluated on; `evaluation` if it is not the same for all runs."""
        splits = {run.result.eval_split for run in self.runs if run.result.eval_split}
        return splits.pop() if len(splits) == 1 else "evaluation"

    @cached_property
    def quality_by_seed(self) -> dict[str, dict[str, float]]:
        """The monitored metric by seed for each `label_without_loader`, the best mean first; empty for a time.

        Loaders deliver identical batches, so runs that differ only in the loader are not independent measurements.
        """
        if not self.metric.depends_on_weights:
            return {}
        groups: dict[str, dict[str, float]] = defaultdict(dict)
        for row in self.rows:
            for seeds, value in row.quality_by_seed(self.metric.name).items():
                groups[row.label_without_loader].setdefault(seeds, value)
        return dict(sorted(groups.items(), key=lambda group: -self.metric.sign * fmean(group[1].values())))

    def best_run(self, row: ReportRow) -> Run:
        """The run of a row with the best value of the monitored metric, the first of equal ones or if none has any."""
        gains = {seeds: self.metric.sign * value for seeds, value in row.quality_by_seed(self.metric.name).items()}
        best = [row.runs_by_seed[seeds] for seeds in gains if gains[seeds] == max(gains.values())]
        return min(best or row.runs, key=row.runs.index)

    @property
    def quality_differs(self) -> bool:
        return len({fmean(values.values()) for values in self.quality_by_seed.values()}) > 1

    @cached_property
    def leads_by_setting(self) -> dict[str, ConfidenceInterval | None]:
        """The lead of the best setting over each other, None with too few seeds in common; empty if all are equal."""
        if not self.quality_differs:
            return {}
        gains: dict[str, dict[str, float]] = {}
        for setting, values in self.quality_by_seed.items():
            # A positive gain is an improvement, whatever the direction of the metric.
            gains[setting] = {seeds: self.metric.sign * value for seeds, value in values.items()}
        best, *others = gains
        differences = PairwiseComparison(gains)
        return {other: differences.compare(best, other) for other in others}

    @property
    def within_noise(self) -> list[str]:
        """The settings whose quality differs from the best one by no more than noise."""
        return [setting for setting, lead in self.leads_by_setting.items() if lead and lead.low <= 0]

    @cached_property
    def sorted_rows(self) -> list[ReportRow]:
        """The rows in the order of table and chart: by setting, best quality first or else by time; then by time."""
        timed_first = sorted(self.rows, key=lambda row: (not row.rounds, row.median_s))
        settings = [row.label_without_loader for row in timed_first]
        if self.quality_differs:
            settings = [*self.quality_by_seed, *settings]
        return sorted(timed_first, key=lambda row: settings.index(row.label_without_loader))

    @property
    def machine_and_data(self) -> str:
        facts = (self.facts.get(title) for title in ("gpu", "cpu", "host", "data"))
        return ", ".join(filter(None, facts)) or "unknown machine and data"


def compare(runs: Sequence[Run]) -> list[Comparison]:
    """Group runs by machine and dataset."""
    # A run without a recorded environment was on the same machine as the other runs of its sweep.
    sweep_facts = {run.folder.parent: facts for run in reversed(runs) if (facts := _facts(run))}
    run_facts = [(run, _facts(run) or sweep_facts.get(run.folder.parent, {})) for run in runs]
    groups: dict[tuple[str | None, ...], list[Run]] = defaultdict(list)
    for run, facts in run_facts:
        host = facts.get("host")
        overlapping = any(host and host == theirs.get("host") and run.overlaps(other) for other, theirs in run_facts)
        groups[tuple(facts.get(title) for title in COMPARABILITY_FACTS)].append(replace(run, overlapping=overlapping))
    return [_build_comparison(group) for group in groups.values()]


def _build_comparison(runs: Sequence[Run]) -> Comparison:
    configs = [_displayed_config(run) for run in runs]
    varied_keys = _varied_keys(configs)
    facts_by_run = [_facts(run) for run in runs]
    recorded = [facts for facts in facts_by_run if facts]
    all_facts = {title: text for facts in recorded for title, text in facts.items()}
    varied = {title for title in all_facts if len({facts.get(title) for facts in recorded}) > 1}
    varied_facts = [title for title in COLUMN_FACTS if title in varied]
    shared_facts = {title: text for title, text in all_facts.items() if title not in varied}
    columns = [*map(_column_title, varied_keys), *varied_facts]
    names = shorten_columns(columns)
    rows: dict[str, ReportRow] = {}
    for run, config, facts in zip(runs, configs, facts_by_run, strict=True):
        values = {_column_title(key): config[key] for key in varied_keys if key in config}
        values |= {title: facts[title] for title in varied_facts if title in facts}
        rows.setdefault(repr(values), ReportRow(values, names, [])).runs.append(run)
    return Comparison(columns, list(rows.values()), shared_facts)


def _column_title(key: str) -> str:
    """Return the key, or for the name of a member its group, such as `data/loader`."""
    return key.removesuffix(".name").replace(".", "/") if key.endswith(".name") else key


def _displayed_config(run: Run) -> dict[str, Any]:
    """Return the configuration as the report compares it.

    The loader is named `prefetch of ram`, or `auto: ram` if `auto` chose it.
    """
    config = dict(run.config)
    for key, value in run.config.items():
        # Each option of a list of members, such as augmentations, is a key: `data.augment.operations.0.pixels`.
        if isinstance(value, list) and value and all(isinstance(member, Mapping) for member in value):
            members = {str(index): member for index, member in enumerate(config.pop(key))}
            config |= flatten_keys(members, f"{key}.")
    # A wrapping loader has the wrapped loader as an option, such as `base`.
    keys = sorted((key for key in config if key.startswith(LOADER_OPTION) and key.endswith(".name")), key=len)
    if len(keys) > 1:
        config["data.loader.name"] = " of ".join(str(config.pop(key)) for key in keys)
    elif run.result.auto:
        config["data.loader.name"] = f"auto: {run.result.auto.get('name')}"
    return config


def _varied_keys(configs: Iterable[Mapping[str, Any]]) -> list[str]:
    recorded = [config for config in configs if config]  # Skip runs without a recorded configuration.
    ignored = [*IGNORED_KEYS, "seed", "data.holdout_seed", "data.fold"]
    keys = dict.fromkeys(key for config in recorded for key in config)
    return [key for key in keys if not is_under(key, ignored) and _varies(key, recorded)]


def _varies(key: str, configs: Iterable[Mapping[str, Any]]) -> bool:
    # An option of a group varies only if it differs among runs of the same member. `num_workers` does not distinguish
    # `disk` from `ram`, because only `disk` has it.
    parts = key.split(".")
    groups = [".".join([*parts[:depth], "name"]) for depth in range(1, len(parts))]
    values: dict[str, set[str]] = defaultdict(set)
    for config in configs:
        members = [config.get(group) for group in groups if group != key]
        values[repr(members)].add(repr(config.get(key)))
    return any(len(different) > 1 for different in values.values())


def _facts(run: Run) -> dict[str, str]:
    """Return machine, software and data of a run, by title, without unknown facts; empty without an environment."""
    environment = run.result.environment
    if not environment:
        return {}
    dataset = run.result.dataset or {}
    sizes = {key.removesuffix("_size"): size for key, size in dataset.items() if key.endswith("_size")}
    if folds := (dataset.get("division") or {}).get("folds"):
        # A fold can have an image more than another one.
        sizes = {f"in {folds} folds": sizes.pop("train", 0) + sizes.pop("validation", 0), **sizes}
    images = ", ".join(f"{format_fact(size)} {split}" for split, size in sizes.items())
    facts = {
        **environment,
        # The key `device` has a column too if it varies.
        "resolved device": run.result.device,
        "processes": (run.result.distributed or {}).get("ranks"),
        "data": f"{format_fact(dataset.get('name'))}, images: {images}" if dataset else None,
        DATA_CHECKSUM: dataset.get("division") or dataset.get("sha256"),
    }
    return {title.replace("_", " "): format_fact(value) for title, value in facts.items() if value not in (None, {})}


def format_fact(value: object) -> str:
    """Format a fact; checksums are cut to 12 digits."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={format_fact(item)}" for key, item in sorted(value.items()))
    if isinstance(value, str) and len(value) == 64 and value.isalnum():
        return value[:12]
    return f"{value:,}" if type(value) is int else str(value)


def _measured(runs: Iterable[Run], name: str) -> list[float]:
    return [value for run in runs if (value := run.value_of(name)) is not None]
