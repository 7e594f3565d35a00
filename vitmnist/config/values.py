"""Configurations as plain values, nested or by their full keys."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException


def to_plain_dict(config: Any) -> dict[str, Any]:
    """A configuration dataclass as JSON values."""
    as_json: dict[str, Any] = json.loads(json.dumps(asdict(config)))
    return as_json


def resolved(composed: DictConfig) -> dict[str, Any]:
    """A composed configuration as plain values; with its interpolations if one of them cannot be resolved."""
    try:
        values = OmegaConf.to_container(composed, resolve=True, enum_to_str=True)
    except OmegaConfBaseException:
        values = OmegaConf.to_container(composed, enum_to_str=True)
    return values  # type: ignore[return-value]


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of a nested configuration by their full keys."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        found |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


def is_under(key: str, sections: Sequence[str]) -> bool:
    """Whether a dotted key is one of `sections` or below one."""
    return any(key == section or key.startswith(f"{section}.") for section in sections)
