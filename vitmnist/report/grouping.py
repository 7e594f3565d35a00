"""Divides runs into comparisons, one for each machine and dataset, and groups the repeats of a configuration.

Columns are found, not listed: any configuration key and any fact about the software that varies is one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, permutations
from typing import Any

from vitmnist.config.labels import trainer_label
from vitmnist.config.schema import affects_nothing, keys_where
from vitmnist.config.values import is_under
from vitmnist.report.compare import NOTHING, Comparison, Configuration
from vitmnist.tracking.runs import Run

MACHINE = ("host", "cpu", "cpu_count")  # keys of `environment` that identify a machine
CHECKSUMS = "SHA-256 of the data"


def compare(runs: Sequence[Run]) -> list[Comparison]:
    """Divide runs by machine and dataset. The order of the runs is kept."""
    runs = mark_overlapping(runs)
    groups: dict[tuple[str, ...], list[Run]] = defaultdict(list)
    for run in runs:
        # A run that never started is listed with the other runs of its sweep.
        siblings = (
            other for other in runs if other.folder.parent == run.folder.parent and other.section("environment")
        )
        groups[_identity(run if run.section("environment") else next(siblings, run))].append(run)
    return [_comparison(group) for group in groups.values()]


def mark_overlapping(runs: Sequence[Run]) -> list[Run]:
    """The runs, with `overlapping` set on those that were active at the same time as another run on their host."""
    spans = [
        (number, host, run.result["began_at"], run.result["ended_at"])
        for number, run in enumerate(runs)
        if (host := run.section("environment").get("host"))
    ]
    overlapping = {
        number
        for (number, host, start, end), (_, other_host, other_start, other_end) in permutations(spans, 2)
        if host == other_host and start < other_end and other_start < end
    }
    return [replace(run, overlapping=number in overlapping) for number, run in enumerate(runs)]


def _identity(run: Run) -> tuple[str, ...]:
    """The machine and the dataset of a run; folds have a dataset in common."""
    machine, dataset = run.section("environment"), run.section("dataset")
    checksums = dataset.get("folds_of") or dataset.get("sha256")
    return tuple(map(fact_text, (*(machine.get(key) for key in MACHINE), dataset.get("name"), checksums)))


def _comparison(runs: Sequence[Run]) -> Comparison:
    configs = [_displayed_config(run) for run in runs]
    facts_by_run = [_facts(run) for run in runs]
    known = [facts for facts in facts_by_run if facts]
    texts = {title: {facts.get(title, NOTHING) for facts in known} for facts in known for title in facts}
    keys, titles = varied_keys(configs), [title for title in texts if len(texts[title]) > 1]
    rows: dict[tuple[str, str], Configuration] = {}
    for run, config, facts in zip(runs, configs, facts_by_run, strict=True):
        values = {_title(key): config[key] for key in keys if key in config}
        values |= {title: facts[title] for title in titles if facts.get(title, NOTHING) != NOTHING}
        unique = str(run.folder) if run.status == "unreadable" else ""  # it repeats no other run
        row = rows.setdefault((unique, repr(values)), Configuration(values, []))
        row.runs.append(run)
    common = {title: text for title, (text, *others) in texts.items() if not others and text != NOTHING}
    return Comparison([*map(_title, keys), *titles], list(rows.values()), common)


def _displayed_config(run: Run) -> dict[str, Any]:
    """The configuration with loader and trainer as the report names them.

    `prefetch of ram`; `auto: ram` for what `auto` chose; `plain, fused=true` for a trainer with changed options.
    """
    config = {key: value for key, value in run.config.items() if not is_under(key, ["trainer"])}
    if trainer := {key[8:]: value for key, value in run.config.items() if key.startswith("trainer.")}:
        config["trainer.name"] = trainer_label(trainer)
    loader, base = config.get("data.loader.name"), config.pop("data.loader.base.name", None)
    chosen = run.section("choices").get("loader", "auto")
    if base:
        config["data.loader.name"] = f"{loader} of {base}"
    elif loader == "auto" and chosen != "auto":
        config["data.loader.name"] = f"auto: {chosen}"
    return config


def varied_keys(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys whose values vary among configurations, apart from seeds and round.

    An option of a group counts only if it varies among runs of the same member: `num_workers`, which only `disk` has,
    does not distinguish `disk` from `ram`.
    """
    varied, skipped = [], [*keys_where(affects_nothing), "seed", "data.holdout_seed"]
    for key in dict.fromkeys(key for config in configs for key in config):
        groups = [f"{group}.name" for group in accumulate(key.split(".")[:-1], "{}.{}".format)]
        values: dict[str, set[str]] = defaultdict(set)
        for config in filter(None, configs):  # an unknown configuration distinguishes nothing
            members = [config.get(name) for name in groups if name != key]
            values[repr(members)].add(repr(config.get(key)))
        if any(len(different) > 1 for different in values.values()) and not is_under(key, skipped):
            varied.append(key)
    return varied


def _title(key: str) -> str:
    """A key as it is typed: a config group with slashes, any other key with dots."""
    return key.removesuffix(".name").replace(".", "/") if key.endswith(".name") else key


def _facts(run: Run) -> dict[str, str]:
    """Machine, software and data of a run, by title; empty if it never started."""
    environment, dataset = run.section("environment"), run.section("dataset")
    if not environment:
        return {}
    known = {**environment, "device": run.result.get("device"), "processes": run.section("distributed").get("ranks")}
    sizes = [
        f"{fact_text(dataset[f'{split}_size'])} {split}"
        for split in ("train", "validation", "test")
        if f"{split}_size" in dataset
    ]
    data = f"{fact_text(dataset.get('name'))}, images: {', '.join(sizes)}" if dataset else None
    known |= {"data": data, CHECKSUMS: dataset.get("folds_of") or dataset.get("sha256")}
    return {title.replace("_", " "): fact_text(value) for title, value in known.items()}


def fact_text(value: Any) -> str:
    """A value of `environment` or `dataset`; commits and checksums are cut to 12 digits."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={fact_text(item)}" for key, item in sorted(value.items())) or NOTHING
    if isinstance(value, str) and len(value) in (40, 64) and value.isalnum():
        return value[:12]
    if type(value) is int:
        return f"{value:,}"
    return NOTHING if value is None else str(value)
