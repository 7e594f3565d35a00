"""Configurations as plain values, nested or by their full keys, also of records that lack a key of today."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict
from typing import Any

from omegaconf import MISSING

from vitmnist.config.schema import registries


def to_plain_dict(config: Any) -> dict[str, Any]:
    """A configuration dataclass as JSON values."""
    as_json: dict[str, Any] = json.loads(json.dumps(asdict(config)))
    return as_json


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of a nested configuration by their full keys."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def is_under(key: str, sections: Sequence[str]) -> bool:
    """Whether a dotted key is one of `sections` or below one."""
    return any(key == section or key.startswith(f"{section}.") for section in sections)


def complete_record(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """The nested values of a record, in which options that a member has been given since have their defaults.

    The default of an added option must therefore say what the member did without it. A record that lacks another key is
    refused by its name when it is validated.
    """
    values = deepcopy(dict(recorded))
    if isinstance(values.get("data"), dict) and "seed" in values:
        values["data"].setdefault("holdout_seed", values["seed"])  # version 0.2 drew the hold-out by the seed
    for key, registry in registries():
        member: Any = values
        for name in key.split("."):
            member = member.get(name) if isinstance(member, dict) else None
        if isinstance(member, dict):
            for option, default in registry.complete({"name": member.get("name")}).items():
                if default != MISSING:
                    member.setdefault(option, json.loads(json.dumps(default)))
    return values
