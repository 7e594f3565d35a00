"""The configuration of a recorded run: the overrides that it was started with, and what they meant then."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from vitmnist.cli.messages import describe
from vitmnist.config.compose import compose
from vitmnist.config.labels import RESUMED, flatten, is_under, resolved
from vitmnist.config.validation import group_at
from vitmnist.errors import ConfigError
from vitmnist.runtime.files import display_path, has_checkpoint

RUNS = Path("outputs/runs")


def compose_again(folder: Path, overrides: list[str]) -> DictConfig:
    """The configuration of a recorded run, with new overrides.

    Raises:
        ConfigError: the folder holds no run, or the overrides cannot be used.
    """
    try:
        return compose(merge(recorded_overrides(folder), overrides))
    except Exception as error:
        raise ConfigError(describe(error).message) from error


def recorded_overrides(folder: Path) -> list[str]:
    """The overrides that compose the configuration of a run's last start, also if files in `conf/` have changed since.

    Raises:
        ConfigError: the folder holds no run, or neither its records nor its checkpoint can be read.
    """
    typed = _typed_overrides(folder)
    if searchpath := config_folders(folder / ".hydra" / "hydra.yaml"):
        typed.append(searchpath)
    before, first = _first_start(folder)
    try:
        kept = _changed(before, [*first, *([searchpath] if searchpath else [])])
    except Exception:  # such as an experiment whose file was removed: all that it set is recorded
        typed = [override for override in typed if key_of(override) not in ("experiment", "hydra.searchpath")]
        kept = _changed(before, [override for override in first if key_of(override) != "experiment"])
    # What was typed on resuming replaces these values; another member of a group also the keys of the former one.
    replaced = [place_of(override) for override in typed if override not in first]
    kept = [override for override in kept if not is_under(place_of(override), replaced)]
    if kept:
        shown = display_path(folder)
        message = f"configuration files have changed since {shown} began; it keeps its values"
        print(f"note: {message}: {', '.join(kept)}", file=sys.stderr)
    return [*typed, *kept]


def config_folders(record: Path) -> str | None:
    """The override that finds the folder of `--config-dir` again, from Hydra's record of a run or sweep."""
    with suppress(OSError, ValueError, YAMLError, OmegaConfBaseException):
        sources: Any = OmegaConf.load(record).hydra.runtime.config_sources
        folders = [f"file://{source.path}" for source in sources if source.provider == "command-line"]
        return f"hydra.searchpath={literal(folders)}" if folders else None
    return None


def _first_start(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """The values and the overrides of a run's first start; empty if they are lost."""
    try:
        before = comparable(OmegaConf.load(folder / ".hydra" / "config.yaml"))
        first: Any = OmegaConf.to_container(OmegaConf.load(folder / ".hydra" / "overrides.yaml"))
        return before, [override for override in first if key_of(override) != "resume"]
    except (OSError, ValueError, AttributeError, YAMLError, OmegaConfBaseException):
        return {}, []


def _changed(before: dict[str, Any], overrides: list[str]) -> list[str]:
    """The overrides that give the recorded values, where `overrides` alone give other ones today."""
    now = comparable(compose(overrides))
    # The members of groups first, because each has keys of its own.
    names = {key.removesuffix(".name"): value for key, value in before.items() if key.endswith(".name")}
    members = [f"{group_at(place)}={name}" for place, name in names.items() if now.get(f"{place}.name") != name]
    if members:
        now = comparable(compose([*overrides, *members]))
    values = [f"{key}={literal(value)}" for key, value in before.items() if key in now and now[key] != value]
    return [*members, *values]


def literal(value: Any) -> str:
    """A plain value in Hydra's grammar."""
    if isinstance(value, list):
        return f"[{','.join(map(literal, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{literal(inner)}" for key, inner in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False)


def _typed_overrides(folder: Path) -> list[str]:
    """The overrides of a run's last start: of its records, or of its checkpoint if these are lost; raises as above."""
    damaged = None
    for file in (folder / RESUMED, folder / ".hydra" / "overrides.yaml"):
        with suppress(FileNotFoundError, NotADirectoryError):
            try:
                recorded: Any = OmegaConf.to_container(OmegaConf.create(file.read_text()))
            except (ValueError, YAMLError, OmegaConfBaseException):  # UnicodeDecodeError is a ValueError
                recorded = None
            if isinstance(recorded, list):
                return [str(override) for override in recorded if key_of(str(override)) != "resume"]
            damaged = file
    if has_checkpoint(folder):
        from vitmnist.checkpoint import storage  # imports torch

        saved = storage.load(folder)["overrides"]
        lost = display_path(damaged or folder / ".hydra")
        print(f"{lost}: is damaged or missing; its checkpoint has the overrides", file=sys.stderr)
        return [override for override in saved if key_of(override) != "resume"]
    if damaged:
        raise ConfigError(f"{damaged}: is damaged; start a new run")
    is_sweep = (folder / "multirun.yaml").is_file()
    hint = "sweep.resume= resumes a sweep" if is_sweep else f"name a folder such as {RUNS}/DATE/TIME-…"
    raise ConfigError(f"{folder}: holds no run; {hint}")


def comparable(composed: Any) -> dict[str, Any]:
    """The values of a composed configuration by their full keys, without those that may differ between two starts."""
    left_out = ("resume", "max_minutes", "stop_signal")
    return {key: value for key, value in flatten(resolved(composed)).items() if key not in left_out}


def last_value(key: str, overrides: Iterable[str]) -> str | None:
    """The value of an override; None if it was not typed or is null."""
    values = [one.partition("=")[2].strip("'\"") for one in overrides if key_of(one) == key]
    return values[-1] if values and values[-1] != "null" else None


def merge(recorded: list[str], new: list[str]) -> list[str]:
    """`new` behind those of `recorded` that it does not replace; another member of a group replaces its keys too."""
    replaced = [place_of(override) for override in new]
    return [*(override for override in recorded if not is_under(place_of(override), replaced)), *new]


def key_of(override: str) -> str:
    """The key or group that an override names."""
    return override.lstrip("+~").partition("=")[0]


def place_of(override: str) -> str:
    """The place in the configuration that an override sets: `data.loader` for `data/loader=ram`."""
    return key_of(override).rpartition("@")[2].replace("/", ".")
