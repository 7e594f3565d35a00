"""The rules of resuming: which runs are resumed, with which values, and what must not change.

docs/architecture.md has the order in which a start calls these functions.
"""

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
from vitmnist.tracking.runs import Run, read_run

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


def is_completed(run: Run, config: Config) -> bool:
    """Whether a run is completed, and `config` neither changes its result nor asks for further epochs.

    Another loader, for example, trains nothing without further epochs: the recorded times are those of the old one.

    Raises:
        ConfigError: a completed run needs more training, but has no checkpoint.
    """
    if run.result.status != "completed":
        return False
    values, recorded = to_json_values(config), to_json_values(load_recorded_config(run.folder, []))
    # `auto` was recorded as the value that it was replaced by.
    is_other_run = any(flatten_keys(values).get(key) != "auto" for key in _find_refused_changes(recorded, config))
    epochs_left = config.epochs_to_train - len(run.result.epochs)
    # A larger `epochs` alone does not continue a run that stopped early.
    is_stopped_early = Monitor(find_metric(config.monitor, "monitor"), config.patience).is_exhausted(run.result.epochs)
    if not is_other_run and (epochs_left == 0 or (epochs_left > 0 and is_stopped_early)):
        return True
    if has_checkpoint(run.folder):
        return False
    raise ConfigError(
        f"{display_path(run.folder)}: is completed, and has no checkpoint to continue from; begin another run with "
        "hydra.run.dir=FOLDER"
    )


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
