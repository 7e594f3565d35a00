"""Configurations as plain values, nested or by their full keys."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any


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
