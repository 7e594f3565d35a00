"""`resume=`: the recorded values of a run, overridden by what was typed.

A record is data: it is checked against the schema, and nothing of it is given to Hydra, resolved or imported.
"""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, ConfigTypeError

from vitmnist.cli.command import program
from vitmnist.cli.messages import describe
from vitmnist.config import is_group
from vitmnist.config.compose import compose
from vitmnist.config.schema import Config
from vitmnist.config.validation import escaped, validate
from vitmnist.config.values import complete_record, to_plain_dict
from vitmnist.errors import ConfigError, DataError, UnknownKeyError, printable
from vitmnist.runtime.files import UnreadableError, display_path, read_yaml
from vitmnist.runtime.run_folder import has_checkpoint
from vitmnist.tracking.epoch_table import may_train_longer
from vitmnist.tracking.result import CONFIG, OVERRIDES, TEST_ACC, read_run

SEVERAL = ("experiment", "hparams_search")  # groups that set keys of other groups


def recorded_config(folder: Path, typed: list[str]) -> Config:
    """The configuration of a run's last start, changed by overrides.

    An override of a group replaces that section, unless it names the member that is recorded.

    Args:
        typed: overrides as for `train.py`; those of `hydra` only serve to find the members of groups.

    Raises:
        ConfigError: the folder holds no run, its record is damaged, or an override cannot be used.
    """
    values = _recorded_values(folder)
    config = OmegaConf.create(escaped(values))
    OmegaConf.set_struct(config, True)
    OmegaConf.set_struct(config.lr_scale, False)  # so that a new pattern is refused as a change
    try:
        _apply(config, typed)
        return validate(Config, config)
    except Exception as error:
        failure = describe(error, typed)
        if not failure.is_user_error:
            raise
        raise ConfigError(failure.message) from error


def _apply(config: DictConfig, typed: list[str]) -> None:
    overrides = OverridesParser.create().parse_overrides(typed)
    overrides.sort(key=lambda override: (not is_group(override.key_or_group), override.package is not None))
    for override in overrides:  # members of groups first, those within another member after it, then keys
        key = override.key_or_group
        if re.split("[./]", key)[0] == "hydra":
            continue
        if override.is_sweep_override():
            raise ConfigError(f"{override.input_line}: a list of values is a sweep, and resume= resumes one run")
        if override.is_delete() or key in SEVERAL:
            raise ConfigError(
                f"{override.input_line}: cannot be typed with resume=; keys such as epochs=10 can, and data/loader=NAME"
            )
        if is_group(key):
            if member := _new_member(config, override, typed):
                _set_value(config, override.package or key.replace("/", "."), member, merge=False)
        else:
            _set_value(config, key, override.value())


def _new_member(recorded: DictConfig, override: Override, typed: list[str]) -> Any:
    """The keys of the member that an override chooses; None if it is the recorded one."""
    section = override.key_or_group.replace("/", ".")
    if OmegaConf.select(recorded, f"{override.package or section}.name") == override.value():
        return None
    searchpath = [text for text in typed if text.startswith("hydra.")]
    return OmegaConf.select(compose([*searchpath, f"{override.key_or_group}={override.value()}"]), section)


def _set_value(config: DictConfig, key: str, value: Any, merge: bool = True) -> None:
    try:
        OmegaConf.update(config, key, value, merge=merge)
    except (ConfigKeyError, ConfigAttributeError, ConfigTypeError) as error:
        parent = OmegaConf.select(config, key.rpartition(".")[0]) if "." in key else config
        siblings = [str(name) for name in parent] if isinstance(parent, DictConfig) else []
        raise UnknownKeyError(key, siblings) from error


def _recorded_values(folder: Path) -> dict[str, Any]:
    """The recorded values; those of the checkpoint if the record is lost or damaged.

    Raises:
        ConfigError: there is neither.
        DataError: those of the checkpoint are damaged.
    """
    source = folder / CONFIG
    try:
        return _plain_values(read_yaml(source))
    except FileNotFoundError as error:
        if not has_checkpoint(folder):
            advice = "name a folder such as outputs/runs/DATE/TIME-…"
            raise ConfigError(f"{display_path(folder)}: holds no run; {advice}") from error
        problem = "is missing"
    except (UnreadableError, ConfigError) as error:
        problem = printable(str(error))
        if not has_checkpoint(folder):
            raise ConfigError(f"{display_path(source)}: {problem}; start a new run") from error
    from vitmnist.checkpoint import storage  # imports torch

    print(f"{display_path(source)}: {problem}; its checkpoint has the configuration", file=sys.stderr)
    try:
        return _plain_values((storage.load(folder) or {}).get("config"))
    except ConfigError as error:
        raise DataError(f"{folder / storage.FOLDER}: {error}") from error


def _plain_values(recorded: Any) -> dict[str, Any]:
    """The values of a record without those of Hydra; raises `ConfigError` if they are not those of a run."""
    if not isinstance(recorded, dict):
        raise ConfigError("is damaged: the configuration is not a mapping")
    values = complete_record({key: value for key, value in recorded.items() if key != "hydra"})
    validate(Config, values)
    return values


def recorded_overrides(folder: Path) -> list[str]:
    """The overrides that a run was started with, to be shown; empty if they are lost."""
    try:
        recorded = read_yaml(folder / OVERRIDES)
    except (FileNotFoundError, UnreadableError):
        return []
    return [str(override) for override in recorded] if isinstance(recorded, list) else []


def is_resumable(folder: Path) -> bool:
    """Whether `resume=auto` continues in this folder rather than starting again: it is completed, or has a checkpoint.

    Prints why checkpoints cannot be used.
    """
    if read_run(folder).status == "completed":
        return True
    if not has_checkpoint(folder):
        return False
    from vitmnist.checkpoint import storage  # imports torch

    try:
        return storage.load(folder) is not None
    except storage.DamagedError as error:
        print(f"resume=auto: {error}")
        return False


def continued(folder: Path, config: Config) -> Config | None:
    """The configuration that resumes the run in a folder; None if it is completed, and its result is printed.

    Raises:
        ConfigError: it is completed with other epochs and has no checkpoint, or what may not change differs.
    """
    run, config, is_extendable = read_run(folder), replace(config, resume=str(folder)), has_checkpoint(folder)
    shown, accuracy = display_path(folder), run.result.summary()["eval_acc_last"]
    if run.status != "completed":
        return config
    before, now = to_plain_dict(recorded_config(folder, [])), to_plain_dict(config)
    has_stopped = run.result.stopped_early and not may_train_longer(before, now)
    if len(run.epochs) != config.epochs and not has_stopped:
        if is_extendable:
            return config
        raise ConfigError(
            f"{shown}: is completed, and has no checkpoint to continue from; start a new run in another folder, with "
            "hydra.run.dir=FOLDER"
        )
    from vitmnist.checkpoint.manager import check_resumable  # imports torch

    check_resumable(before, now)
    result = "" if accuracy is None else f", accuracy {accuracy:.2f}%"
    if (test_acc := run.quality(TEST_ACC)) is not None and run.result.test:
        result = f", test accuracy {test_acc:.2f}% ({run.result.test.get('weights')} weights)"
    key, stopped = ("patience", ", stopped early") if has_stopped else ("epochs", "")
    further = f"; train further with\n    {program()} {shlex.quote(f'resume={shown}')} {key}=N"
    print(f"{shown}: completed{stopped}, epoch {len(run.epochs)}/{config.epochs}{result}{further * is_extendable}")
    return None
