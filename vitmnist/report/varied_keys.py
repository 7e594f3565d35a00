"""The keys of the configuration in which runs differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vitmnist.config.labels import NOT_COMPARED, is_under, leaves, trainer_label
from vitmnist.report.runs import Run

REPEATS = (*NOT_COMPARED, "seed")  # runs that differ in these alone are repeats of one configuration


def flat_values(run: Run) -> dict[str, Any]:
    """A run's configuration by full keys; empty where it is not known.

    Loader and trainer get the names of the report: `prefetch of ram`, `auto: ram` for what `auto` chose,
    `plain, fused=true`.
    """
    config = dict(run.config)
    if isinstance(trainer := config.get("trainer"), Mapping):
        config["trainer"] = {"name": trainer_label(trainer)}
    values = leaves(config)
    if base := values.pop("data.loader.base.name", None):
        values["data.loader.name"] = f"{values.get('data.loader.name')} of {base}"
    chosen = (run.result.get("choices") or {}).get("loader", "auto")
    if values.get("data.loader.name") == "auto" and chosen != "auto":
        values["data.loader.name"] = f"auto: {chosen}"
    return {key: str(value) if isinstance(value, list) else value for key, value in values.items()}


def varied_keys(flat: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys whose values differ among configurations, as `flat_values` gives them.

    Below a group whose members differ, a key counts only if it differs among runs of the same member: `num_workers`
    does not distinguish `disk` from `ram`, their names do.
    """
    found = []
    for key in dict.fromkeys(key for values in flat for key in values):
        if is_under(key, REPEATS):
            continue
        by_member: dict[tuple[Any, ...], set[str]] = {}
        for values in flat:
            if values:  # a run whose configuration is not known distinguishes nothing
                by_member.setdefault(_members_above(key, values), set()).add(repr(values.get(key)))
        if any(len(different) > 1 for different in by_member.values()):
            found.append(key)
    return found


def _members_above(key: str, values: Mapping[str, Any]) -> tuple[Any, ...]:
    """The members that were chosen of the groups that contain a key."""
    parts = key.split(".")
    groups = [".".join(parts[:depth]) for depth in range(1, len(parts))]
    own = key.removesuffix(".name") if key.endswith(".name") else None
    return tuple(values.get(f"{group}.name") for group in groups if group != own)


def title_of(key: str) -> str:
    """A key as one types it: a group by its path, all else with dots."""
    return key.removesuffix(".name").replace(".", "/") if key.endswith(".name") else key
