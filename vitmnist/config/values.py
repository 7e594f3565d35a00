"""A configuration as plain values or as text: nested or by full keys, and short names for folders and reports."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from omegaconf import ListConfig, OmegaConf

from vitmnist.config import is_group
from vitmnist.config.schema import registries

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def to_plain_dict(config: DataclassInstance) -> dict[str, Any]:
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
    for key, registry in registries():
        path, _, name = key.rpartition(".")
        section = values.get(path) if path else values
        if isinstance(section, dict) and isinstance(section.get(name), dict):
            section[name] |= registry.complete(section[name])  # the keys that it has stay first
    completed: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return completed


def run_label(overrides: Sequence[str] | ListConfig) -> str:
    """A folder name from a job's overrides: `["data/loader=ram", "batch_size=300"]` gives `ram-bs300`.

    It is cut to 80 characters; the folder's number or token tells jobs apart.
    """
    if isinstance(overrides, ListConfig):
        overrides = OmegaConf.to_container(overrides)  # type: ignore[assignment]  # interpolations as they were typed
    parts = []
    for override in overrides:
        name, _, value = override.lstrip("+~").partition("=")
        short = "bs" if name == "batch_size" else name.split("@")[-1].split(".")[-1]
        if override.startswith("~"):
            parts.append(f"no_{short}")
        elif name not in ("data.root", "repeats", "resume"):
            parts.append(value if is_group(name) and "@" not in name else f"{short}{value_text(value)}")
    return re.sub(r"[^\w.+-]+", "_", "-".join(parts))[:80] or "defaults"


def value_text(value: object) -> str:
    """A value of the configuration; a number of more than eight characters has three significant digits."""
    text = str(value)
    is_long = len(text) > 8 and re.fullmatch(r"-?\d*\.?\d+(e[+-]?\d+)?", text) and not text.lstrip("-").isdigit()
    return f"{float(text):.3g}" if is_long else text
