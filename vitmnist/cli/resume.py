"""Reads the recorded configuration of a run for `resume=`, and applies overrides to it.

The record is treated as data: it is checked against the schema, and never passed to Hydra, interpolated or imported.
"""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from vitmnist.cli.arguments import is_hydra_override, parse_key, without_keys
from vitmnist.cli.command import echo
from vitmnist.config import is_group
from vitmnist.config.compose import compose
from vitmnist.config.schema import (
    Config,
    dotted_keys,
    fill_defaults,
    is_ignored_in_comparison,
    is_under,
    keys_where,
    to_json_values,
)
from vitmnist.config.validation import escape_interpolations, validate
from vitmnist.errors import ConfigError
from vitmnist.metrics.epoch_record import Monitor
from vitmnist.metrics.epoch_table import find_metric
from vitmnist.report.summary import format_quality
from vitmnist.runtime.files import UnreadableError, display_path, read_json_or_yaml
from vitmnist.runtime.run_folder import has_checkpoint
from vitmnist.tracking.result import CONFIG_FILE, OVERRIDES
from vitmnist.tracking.runs import read_run

# The files of these groups can set any key (`@package _global_`).
GLOBAL_GROUPS = ("experiment", "hparams_search")


def load_recorded_config(folder: Path, overrides: list[str]) -> Config:
    """Load the configuration of the last start of a run, and apply overrides.

    Hydra's own overrides only locate the members of groups. An override of a group replaces its section, unless it
    names the recorded member.

    Raises:
        ConfigError: the folder holds no run, its record is damaged, or an override cannot be used.
        HydraException, OmegaConfBaseException: an override is wrong.
    """
    config = OmegaConf.create(escape_interpolations(_recorded_values(folder)))
    hydra_overrides = [*filter(is_hydra_override, overrides)]
    changes = OverridesParser.create().parse_overrides([text for text in overrides if not is_hydra_override(text)])
    # Apply members of groups first, then members within other members, then keys.
    for change in sorted(changes, key=lambda item: (not is_group(item.key_or_group), item.package is not None)):
        _apply(config, change, hydra_overrides)
    # Validation also refuses unknown keys.
    return validate(Config, config)


def _apply(config: DictConfig, override: Override, hydra_overrides: list[str]) -> None:
    key, value = override.key_or_group, override.value()
    if override.is_sweep_override():
        raise ConfigError(f"{override.input_line}: a list of values is a sweep, and resume= resumes one run")
    if override.is_delete():
        raise ConfigError(
            f"{override.input_line}: cannot be typed with resume=; keys such as epochs=10 can, and data/loader=NAME"
        )
    if not is_group(key):
        OmegaConf.update(config, key, value, merge=key != "lr_scale")
        return
    section = key.replace("/", ".")
    target = override.package or section
    if OmegaConf.select(config, f"{target}.name") != value:
        member = OmegaConf.select(compose([*hydra_overrides, f"{key}={value}"]), section)
        OmegaConf.update(config, target, member, merge=False)


def _recorded_values(folder: Path) -> dict[str, object]:
    source = folder / CONFIG_FILE
    try:
        recorded = read_json_or_yaml(source)
        if not isinstance(recorded, dict):
            raise UnreadableError("is not the configuration of a run")
        values = fill_defaults({key: value for key, value in recorded.items() if key != "hydra"})
        validate(Config, values)
    except FileNotFoundError as error:
        path = display_path(folder)
        raise ConfigError(f"{path}: holds no run; name a folder such as outputs/runs/DATE/TIME-…") from error
    except (UnreadableError, ConfigError) as error:
        raise ConfigError(f"{display_path(source)}: {error}; restore the file, or start a new run") from error
    return values


def split_global_overrides(folder: Path, overrides: list[str]) -> tuple[list[str], list[str]]:
    """Return the overrides of `GLOBAL_GROUPS` that began the run, and the typed overrides of all other keys.

    Raises:
        ConfigError: a typed override selects another member of a global group.
    """
    try:
        recorded: Any = read_json_or_yaml(folder / OVERRIDES)
    except (FileNotFoundError, UnreadableError):
        recorded = overrides
    initial = [override for override in recorded if parse_key(override) in GLOBAL_GROUPS]
    for override in overrides:
        if parse_key(override) in GLOBAL_GROUPS and override not in initial:
            raise ConfigError(
                f"{override}: the run in {display_path(folder)} began with {' '.join(initial) or 'no experiment'}, and "
                "its values are kept; type keys such as epochs=10, or begin another run with hydra.run.dir=FOLDER"
            )
    return initial, without_keys(overrides, GLOBAL_GROUPS)


def has_run_to_continue(folder: Path) -> bool:
    """Whether `resume=auto` continues the run in a folder, or prints its result; otherwise, it begins a new run."""
    return has_checkpoint(folder) or read_run(folder).result.status == "completed"


def print_if_completed(folder: Path, config: Config) -> bool:
    """Print the result of a completed run; returns False if it needs more training, for example more epochs.

    Raises:
        ConfigError: the run needs more training, but has no checkpoint.
    """
    run = read_run(folder)
    path, epochs = display_path(folder), run.result.epochs
    if run.result.status != "completed":
        return False
    metric = find_metric(config.monitor, "monitor")
    is_exhausted = Monitor(metric, config.patience).is_exhausted(epochs)
    has_epochs_left = len(epochs) < config.epochs
    ignored = keys_where(is_ignored_in_comparison)
    if is_exhausted and has_epochs_left:
        # More epochs alone do not continue a run that has stopped early.
        ignored += ["epochs", "patience"]
    # Changing a key that affects neither result nor timing, such as `logger`, does not resume a completed run.
    if _values_without(ignored, config) != _values_without(ignored, load_recorded_config(folder, [])):
        if has_checkpoint(folder):
            return False
        raise ConfigError(
            f"{path}: is completed, and has no checkpoint to continue from; start a new run in another folder, with "
            "hydra.run.dir=FOLDER"
        )
    value = run.value_of(metric.name)
    result = "" if value is None else f", {metric.name} {format_quality(metric, value)}"
    changes = ["patience=M"] * is_exhausted + ["epochs=N"] * (not has_epochs_left)
    further = shlex.join([f"resume={path}", *changes])
    echo(f"{path}: completed, epoch {len(epochs)}/{config.epochs}{result}; {further} trains further")
    return True


def _values_without(ignored: Sequence[str], config: Config) -> dict[str, object]:
    return {key: value for key, value in dotted_keys(to_json_values(config)).items() if not is_under(key, ignored)}
