"""Decides whether `resume=` continues the run in a folder, and with which overrides."""

import shlex
from pathlib import Path
from typing import Any

from vitmnist.cli.arguments import without_keys
from vitmnist.config import parse_key
from vitmnist.config.schema import Config, find_changeable_keys, flatten_keys, is_under, to_json_values
from vitmnist.errors import ConfigError
from vitmnist.metrics.epoch_record import Monitor
from vitmnist.metrics.epoch_table import find_metric
from vitmnist.report.summary import format_quality
from vitmnist.runtime.files import UnreadableError, display_path, read_json_or_yaml
from vitmnist.runtime.run_folder import has_checkpoint
from vitmnist.tracking.recorded_config import load_recorded_config
from vitmnist.tracking.result import OVERRIDES
from vitmnist.tracking.runs import read_run

# The files of these groups can set any key (`@package _global_`).
GLOBAL_GROUPS = ("experiment", "hparams_search")


def merge_overrides(folder: Path, overrides: list[str]) -> tuple[list[str], list[str]]:
    """Return the recorded overrides that no new one replaces, and the new ones except those of `GLOBAL_GROUPS`.

    Raises:
        ConfigError: a new override selects another member of a global group.
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
    changed = without_keys(overrides, GLOBAL_GROUPS)
    return without_keys(recorded, [*map(parse_key, changed)]), changed


def print_if_completed(folder: Path, config: Config) -> bool:
    """Print the result of a completed run; returns False if it is not completed, or if `config` changes its result.

    Another loader, for example, trains nothing without further epochs: the recorded times are those of the old one.

    Raises:
        ConfigError: a completed run needs more training, for example more epochs, but has no checkpoint.
    """
    run = read_run(folder)
    path, epochs = display_path(folder), run.result.epochs
    if run.result.status != "completed":
        return False
    metric = find_metric(config.monitor, "monitor")
    is_exhausted = Monitor(metric, config.patience).is_exhausted(epochs)
    epochs_left = config.epochs_to_train - len(epochs)
    values, recorded = (flatten_keys(to_json_values(each)) for each in (config, load_recorded_config(folder, [])))
    changed = [key for key, value in values.items() if value not in (recorded.get(key), "auto")]
    is_other_run = any(not is_under(key, find_changeable_keys(config)) for key in changed)
    # A larger `epochs` alone does not continue a run that stopped early.
    if is_other_run or epochs_left < 0 or (epochs_left and not is_exhausted):
        if has_checkpoint(folder):
            return False
        raise ConfigError(
            f"{path}: is completed, and has no checkpoint to continue from; begin another run with hydra.run.dir=FOLDER"
        )
    value = run.value_of(metric.name)
    result = "" if value is None else f", {metric.name} {format_quality(metric, value)}"
    if config.limit_batches:
        print(f"{path}: completed{result}; it was limited by limit_batches={config.limit_batches}")
        return True
    changes = ["patience=M"] * is_exhausted + ["epochs=N"] * (not epochs_left)
    arguments = shlex.join([f"resume={path}", *changes])
    print(f"{path}: completed, epoch {len(epochs)}/{config.epochs}{result}; to continue, set {arguments}")
    return True
