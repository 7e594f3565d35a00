"""Short names for a job's folder and for its trainer, made from the configuration."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from omegaconf import ListConfig, OmegaConf

from vitmnist.config import CONF


def run_label(overrides: Sequence[str] | ListConfig) -> str:
    """A folder name from a job's overrides: `["data/loader=ram", "batch_size=300"]` gives `ram-bs300`.

    In a name above 80 characters the longest parts lose their middles, so that it still has every key and number.
    """
    if isinstance(overrides, ListConfig):
        overrides = OmegaConf.to_container(overrides)  # type: ignore[assignment]  # interpolations as they were typed
    parts = []
    for override in overrides:
        name, _, value = override.lstrip("+~").partition("=")
        is_group = "/" in name or (CONF / name).is_dir()
        short = "bs" if name == "batch_size" else name.split("@")[-1].split(".")[-1]
        if override.startswith("~"):
            parts.append(f"no_{short}")
        elif name not in ("data.root", "repeats", "resume"):
            parts.append(value if is_group and "@" not in name else f"{short}{value_text(value)}")
    parts = [re.sub(r"[^\w.+-]+", "_", part) for part in parts]
    longest = max(map(len, parts), default=0)
    while len(label := "-".join(_shortened(part, longest) for part in parts)) > 80 and longest > 3:
        longest -= 1
    return label[:80] or "defaults"


def _shortened(part: str, length: int) -> str:
    """A part cut to `length` characters, of which most are its end, where values differ; but a number is not cut."""
    number = re.search(r"[-+\d.e]*$", part)[0]  # type: ignore[index]  # it may be empty
    head = length // 3
    short = f"{part[:head]}_{part[-max(length - head - 1, len(number)) :]}"
    return short if len(short) < len(part) else part


def value_text(value: Any) -> str:
    """A value of the configuration; a number of more than eight characters has three significant digits."""
    text = str(value)
    is_long = len(text) > 8 and re.fullmatch(r"-?\d*\.?\d+(e[+-]?\d+)?", text) and not text.lstrip("-").isdigit()
    return f"{float(text):.3g}" if is_long else text


def trainer_label(values: Mapping[str, Any]) -> str:
    """A short name of a `trainer` section: the closest member of the group and what differs, as `plain, fused=true`."""
    labels = []
    for name, member in _trainers().items():
        changed = {key: value for key, value in values.items() if value != member.get(key)}
        changes = [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in changed.items()]
        labels.append((len(changes), ", ".join([name, *changes])))
    return min(labels)[1]


@cache
def _trainers() -> dict[str, Any]:
    """The members of the group `trainer`, by name."""
    return {file.stem: OmegaConf.load(file) for file in sorted((CONF / "trainer").glob("*.yaml"))}
