"""The recorded configuration of a run, and the rules of resuming: which runs, with which values, what must not change.

The record is treated as data: it is checked against the schema, and never passed to Hydra, interpolated or imported.
docs/architecture.md has the order in which a start calls these functions.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from vitmnist.config import is_group, is_hydra_override, is_under, parse_key, without_keys
from vitmnist.config.schema import FREE_KEYS, Config, fill_defaults, find_changeable_keys, flatten_keys, to_json_values
from vitmnist.config.validation import escape_interpolations, validate
from vitmnist.errors import ConfigError
from vitmnist.metrics import MetricCollection
from vitmnist.metrics.epoch_record import Monitor
from vitmnist.metrics.epoch_table import find_metric
from vitmnist.runtime.files import UnreadableError, display_path, read_json_or_yaml
from vitmnist.runtime.run_folder import has_checkpoint
from vitmnist.tracking.result import CONFIG_FILE, OVERRIDES
from vitmnist.tracking.runs import read_run

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

# The files of these groups can set any key (`@package _global_`).
GLOBAL_GROUPS = ("experiment", "hparams_search")


def is_resumable(folder: Path) -> bool:
    """Whether `resume=auto` resumes the run in a folder: it has a checkpoint, or is completed."""
    return has_checkpoint(folder) or read_run(folder).result.status == "completed"


def load_resumed_config(folder: Path, overrides: Iterable[str]) -> tuple[Config, list[str]]:
    """Load the recorded configuration of a run, and apply overrides.

    Returns:
        The configuration, and the overrides to record: the recorded ones that no new one replaces, then the new ones.

    Raises:
        ConfigError: an override selects another member of `GLOBAL_GROUPS`, whose values are kept.
        ConfigError, HydraException, OmegaConfBaseException: as `load_recorded_config`.
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
                "its values are kept; set keys such as epochs=10, or begin another run with hydra.run.dir=FOLDER"
            )
    changes = without_keys(overrides, GLOBAL_GROUPS)
    unchanged = without_keys(recorded, [*map(parse_key, changes)])
    return load_recorded_config(folder, changes), [*unchanged, *changes]


def describe_completed(folder: Path, config: Config) -> str | None:
    """Describe a completed run that needs no more training; None for a run that is to be trained.

    Another loader, for example, trains nothing without further epochs: the recorded times are those of the old one.

    Raises:
        ConfigError: a completed run needs more training, for example more epochs, but has no checkpoint.
    """
    run = read_run(folder)
    if run.result.status != "completed":
        return None
    path, epochs, metric = display_path(folder), run.result.epochs, find_metric(config.monitor, "monitor")
    is_stopped_early = Monitor(metric, config.patience).is_exhausted(epochs)
    epochs_left = config.epochs_to_train - len(epochs)
    config = replace(config, metrics=MetricCollection(config.metrics).configs)  # As `Trainer` records it.
    changes = _find_refused_changes(to_json_values(load_recorded_config(folder, [])), config)
    is_other_run = any(new != "auto" for _, new in changes.values())  # A value that replaced `auto` was recorded.
    # A larger `epochs` alone does not continue a run that stopped early.
    if is_other_run or epochs_left < 0 or (epochs_left and not is_stopped_early):
        if has_checkpoint(folder):
            return None
        raise ConfigError(
            f"{path}: is completed, and has no checkpoint to continue from; begin another run with hydra.run.dir=FOLDER"
        )
    value = run.value_of(metric.name)
    result = "" if value is None else f", {metric.name} {metric.format(value)}"
    if config.limit_batches:
        return f"{path}: completed{result}; it was limited by limit_batches={config.limit_batches}"
    arguments = [f"resume={path}"]
    if is_stopped_early:
        arguments.append("patience=M")
    if not epochs_left:
        arguments.append("epochs=N")
    epoch = f"epoch {len(epochs)}/{config.epochs}"
    return f"{path}: completed, {epoch}{result}; to continue, set {shlex.join(arguments)}"


def check_resumable(recorded: Mapping[str, Any], config: Config, started_epochs: int) -> None:
    """Check the configuration of a resumed run against that of its checkpoint.

    Raises:
        ConfigError: keys that must not change differ (the message names all of them), or more epochs have been started
            than are configured.
    """
    if changed := _find_refused_changes(recorded, config):
        changes = ", ".join(f"{key}={new} (it was {old})" for key, (old, new) in changed.items())
        raise ConfigError(
            f"resume: the run began with another configuration: {changes}; only "
            f"{', '.join(find_changeable_keys(config))} may change"
        )
    if config.epochs < started_epochs:
        raise ConfigError(
            f"epochs={config.epochs}: the run has already started epoch {started_epochs}; set epochs={started_epochs} "
            "or more"
        )


def _find_refused_changes(recorded: Mapping[str, Any], config: Config) -> dict[str, tuple[Any, Any]]:
    """Return the old and the new value of each key that differs, except those that a resumed run may change."""
    old, new, allowed = flatten_keys(recorded), flatten_keys(to_json_values(config)), find_changeable_keys(config)
    keys = [key for key in sorted(old.keys() | new.keys()) if not is_under(key, allowed)]
    return {key: (old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)}


def load_recorded_config(folder: Path, overrides: list[str]) -> Config:
    """Load the configuration of the last start of a run, and apply overrides.

    Overrides of Hydra's keys are used only to find the members of groups. An override of a group replaces its section,
    unless it selects the recorded member.

    Raises:
        ConfigError: the folder holds no run, its record is damaged, or an override is not allowed when resuming.
        HydraException, OmegaConfBaseException: an override is invalid.
    """
    # Import late: the trainer imports this module, and does not need Hydra.
    from hydra.core.override_parser.overrides_parser import OverridesParser

    config = OmegaConf.create(escape_interpolations(_recorded_values(folder)))
    hydra_overrides = [*filter(is_hydra_override, overrides)]
    changes = OverridesParser.create().parse_overrides([text for text in overrides if not is_hydra_override(text)])
    # Apply members of groups first, then members within other members, then keys.
    for change in sorted(changes, key=lambda item: (not is_group(item.key_or_group), item.package is not None)):
        _apply(config, change, hydra_overrides)
    # This also refuses unknown keys.
    return validate(Config, config)


def _apply(config: DictConfig, override: Override, hydra_overrides: list[str]) -> None:
    from vitmnist.config.compose import compose  # Import late, as above.

    key, value = override.key_or_group, override.value()
    if override.is_sweep_override() or override.is_delete():
        raise ConfigError(
            f"{override.input_line}: cannot be combined with resume=; set keys such as epochs=10, or data/loader=NAME"
        )
    if not is_group(key):
        OmegaConf.update(config, key, value, merge=key not in FREE_KEYS)
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
            raise UnreadableError("does not contain the configuration of a run")
        values = fill_defaults({key: value for key, value in recorded.items() if key != "hydra"})
        validate(Config, values)
    except FileNotFoundError as error:
        path = display_path(folder)
        raise ConfigError(f"{path}: holds no run; pass a folder such as outputs/runs/DATE/TIME-…") from error
    except (UnreadableError, ConfigError) as error:
        raise ConfigError(f"{display_path(source)}: {error}; restore the file, or start a new run") from error
    return values
