"""Completes the configuration of a record, which may have been written before a key was added."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from omegaconf import MISSING

from vitmnist.config.schema import registries


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
