"""Keys that records of earlier versions have, and what they are called today."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from omegaconf import MISSING

from vitmnist.config.schema import registries

CURRENT_KEYS: dict[str, str | None] = {
    # 0.1
    "data.loader.resident": None,
    "data.loader.base.resident": None,
    "sweep.target_acc": None,
    "trainer.cuda_graph": None,
    "label_smoothing": "loss.label_smoothing",
    "tensorboard": "log",
}
"""The key or section of today for each that has moved; None: it is dropped, since it changed no result."""

ADDED_KEYS: dict[str, Any] = {
    # 0.3
    "data.holdout_seed": lambda record: record.get("seed", MISSING),  # which drew the hold-out
    # 0.2
    "loss.name": "cross_entropy",
    "trainer.clip_norm": None,
    "logger": ["tensorboard"],
    "data.normalize": "dataset",
    "monitor": "eval_acc",
    "patience": None,
    "init": None,
    "init_skip": [],
    "lr_scale": {},
    "sweep.objective": None,
}
"""Keys that a record of an earlier version lacks, with the value that says what it did, or a function of the record;
options of members are not here (see `completed`)."""


def with_current_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """The nested values of a record of any version, by the keys of this one; empty if they are unknown."""
    current = deepcopy(dict(values))
    for old, new in CURRENT_KEYS.items():
        parent, name = _section_of(current, old)
        if name in parent:
            value = parent.pop(name)
            if new:
                _set_default(current, new, value)
    for key, value in deepcopy(ADDED_KEYS).items() if current else ():
        _set_default(current, key, value(current) if callable(value) else value)
    return current


def completed(values: Mapping[str, Any]) -> dict[str, Any]:
    """`with_current_keys`, and the options that a member has been given since, with their defaults.

    The default of an option that is added must therefore say what the member did without it.
    """
    current = with_current_keys(values)
    for key, registry in registries():
        parent, name = _section_of(current, key)
        if isinstance(member := parent.get(name), dict):
            for option, value in registry.complete({"name": member.get("name")}).items():
                if value != MISSING:
                    member.setdefault(option, json.loads(json.dumps(value)))
    return current


def _section_of(values: dict[str, Any], key: str) -> tuple[dict[str, Any], str]:
    """The section of a key, empty if there is none, and its name there."""
    *sections, name = key.split(".")
    found: Any = values
    for section in sections:
        found = found.get(section) if isinstance(found, dict) else None
    return (found if isinstance(found, dict) else {}), name


def _set_default(values: dict[str, Any], key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for section in sections:
        values = values.setdefault(section, {})
    if isinstance(values, dict):
        values.setdefault(name, value)
