"""The rules of resuming: which runs are resumed, with which values, and what must not change.

docs/architecture.md has the order in which a start calls these functions.
"""

import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from vitmnist.config import parse_key, without_keys
from vitmnist.config.schema import Config, find_changeable_keys, flatten_keys, is_under, to_json_values
from vitmnist.errors import ConfigError
from vitmnist.metrics.epoch_record import Monitor
from vitmnist.metrics.epoch_table import find_metric
from vitmnist.runtime.files import UnreadableError, display_path, read_json_or_yaml
from vitmnist.runtime.run_folder import has_checkpoint
from vitmnist.tracking.recorded_config import load_recorded_config
from vitmnist.tracking.result import OVERRIDES
from vitmnist.tracking.runs import read_run

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


def print_if_completed(folder: Path, config: Config) -> bool:
    """Print the result of a completed run; returns False if it is not completed, or if `config` changes its result.

    Another loader, for example, trains nothing without further epochs: the recorded times are those of the old one.

    Raises:
        ConfigError: a completed run needs more training, for example more epochs, but has no checkpoint.
    """
    run = read_run(folder)
    if run.result.status != "completed":
        return False
    path, epochs, metric = display_path(folder), run.result.epochs, find_metric(config.monitor, "monitor")
    is_stopped_early = Monitor(metric, config.patience).is_exhausted(epochs)
    epochs_left = config.epochs_to_train - len(epochs)
    values, recorded = flatten_keys(to_json_values(config)), to_json_values(load_recorded_config(folder, []))
    # A value that replaced `auto` was recorded.
    is_other_run = any(values.get(key) != "auto" for key in _find_refused_changes(recorded, config))
    # A larger `epochs` alone does not continue a run that stopped early.
    if is_other_run or epochs_left < 0 or (epochs_left and not is_stopped_early):
        if has_checkpoint(folder):
            return False
        raise ConfigError(
            f"{path}: is completed, and has no checkpoint to continue from; begin another run with hydra.run.dir=FOLDER"
        )
    value = run.value_of(metric.name)
    result = "" if value is None else f", {metric.name} {metric.format(value)}"
    if config.limit_batches:
        print(f"{path}: completed{result}; it was limited by limit_batches={config.limit_batches}")
    else:
        changes = ["patience=M"] * is_stopped_early + ["epochs=N"] * (not epochs_left)
        arguments = shlex.join([f"resume={path}", *changes])
        print(f"{path}: completed, epoch {len(epochs)}/{config.epochs}{result}; to continue, set {arguments}")
    return True


def check_resumable(recorded: Mapping[str, Any], config: Config, started_epochs: int) -> None:
    """Check the configuration of a resumed run against that of its checkpoint.

    Raises:
        ConfigError: keys that must not change differ (the message names all of them), or more epochs have been started
            than are configured.
    """
    if changed := _find_refused_changes(recorded, config):
        old, new = flatten_keys(recorded), flatten_keys(to_json_values(config))
        changes = ", ".join(f"{key}={new.get(key)} (it was {old.get(key)})" for key in changed)
        raise ConfigError(
            f"resume: the run began with another configuration: {changes}; only "
            f"{', '.join(find_changeable_keys(config))} may change"
        )
    if config.epochs < started_epochs:
        raise ConfigError(
            f"epochs={config.epochs}: the run has already started epoch {started_epochs}; set epochs={started_epochs} "
            "or more"
        )


def _find_refused_changes(recorded: Mapping[str, Any], config: Config) -> list[str]:
    """List the keys that differ, except those that a resumed run may change."""
    old, new = flatten_keys(recorded), flatten_keys(to_json_values(config))
    changed = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]
    allowed = find_changeable_keys(config)
    return [key for key in changed if not is_under(key, allowed)]
