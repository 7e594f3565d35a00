"""Names made of configurations: folder names, flattened keys, labels."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

PACKAGE = Path(__file__).resolve().parent.parent


# A wheel carries conf/ inside the package; in a source tree it stands beside it.
CONF = next(folder for folder in (PACKAGE / "conf", PACKAGE.parent / "conf") if folder.is_dir())


# What tells nothing of what a run learns or measures: keys, and sections of them.
NOT_COMPARED = (
    "checkpoint",
    "data.root",
    "distributed",
    "max_minutes",
    "repeat",
    "repeats",
    "resume",
    "sweep",
    "tensorboard",
)


UNNAMED = ("data.root", "repeats")  # what a folder is not named after


def trainer_label(values: Mapping[str, Any]) -> str:
    """How one speaks of a trainer: by its member of the group, and what was changed of it: `plain, fused=true`."""
    changes: dict[str, list[str]] = {}
    for file in sorted((CONF / "trainer").glob("*.yaml")):
        member = OmegaConf.to_container(OmegaConf.load(file))
        changes[file.stem] = [
            f"{key}={value if isinstance(value, str) else json.dumps(value)}"
            for key, value in values.items()
            if value != member.get(key)  # type: ignore[union-attr]
        ]
    name = min(changes, key=lambda member: len(changes[member]))
    return ", ".join([name, *changes[name]])


def is_under(key: str, places: Sequence[str]) -> bool:
    """Whether a dotted key is one of these, or stands below one."""
    return any(key == place or key.startswith(f"{place}.") for place in places)


def leaves(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of a nested configuration by their full keys."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            found |= leaves(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def run_label(overrides: Sequence[str] | ListConfig) -> str:
    """A folder name from a job's overrides: `["data/loader=ram", "batch_size=300"]` gives `ram-bs300`."""
    if isinstance(overrides, ListConfig):
        overrides = OmegaConf.to_container(overrides)  # type: ignore[assignment]  # as typed, interpolations too
    parts = []
    for override in overrides:
        name, _, value = override.lstrip("+~").partition("=")
        group = "/" in name or name in ("model", "optimizer", "schedule", "trainer", "experiment", "hparams")
        short = "bs" if name == "batch_size" else name.split("@")[-1].split(".")[-1]
        if override.startswith("~"):
            parts.append(f"no_{short}")
        elif name not in UNNAMED:
            parts.append(value if group and "@" not in name else f"{short}{value}")
    return re.sub(r"[^\w.+-]+", "_", "-".join(parts))[:80] or "defaults"


def plain(config: Any) -> dict[str, Any]:
    """The configuration as JSON knows it."""
    as_json: dict[str, Any] = json.loads(json.dumps(asdict(config)))
    return as_json


def resolved(composed: DictConfig) -> dict[str, Any]:
    """A configuration as plain values; with its interpolations as they are, if one of them cannot be resolved."""
    try:
        values = OmegaConf.to_container(composed, resolve=True, enum_to_str=True)
    except OmegaConfBaseException:
        values = OmegaConf.to_container(composed, enum_to_str=True)
    return values  # type: ignore[return-value]
