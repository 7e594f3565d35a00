"""Errors of Hydra and OmegaConf, said in one or two lines that name the key and what is allowed."""

from __future__ import annotations

import re
from pathlib import Path

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException, ValidationError

from vitmnist.config import Config, wrong_type
from vitmnist.errors import UserError, choices, first_line

# What Hydra knows only when a plugin is installed, and the extra that installs it.
PLUGINS = {
    ("hydra/sweeper", "optuna"): "search",
    ("hydra/launcher", "joblib"): "launchers",
    ("hydra/launcher", "submitit_local"): "launchers",
    ("hydra/launcher", "submitit_slurm"): "launchers",
    ("hydra/launcher", "ray"): "ray",
}


def explain(error: BaseException, conf: Path) -> str | None:
    """What to tell the person; None if the error is not theirs to mend, and its traceback should be seen.

    Args:
        conf: the folder of the config groups.
    """
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, MissingConfigException):
        return _unknown_choice(error)
    if isinstance(error, OverrideParseException):
        return f"{error.override}: cannot be read; write KEY=VALUE, and put special characters in quotes"
    if isinstance(error.__cause__, ConfigKeyError | ConfigAttributeError):
        key = str(error.__cause__.full_key)
        return _unknown_group(key, conf) if "/" in key else _unknown_key(error.__cause__)
    if isinstance(error.__cause__, ValidationError):
        return wrong_type(Config, error.__cause__)
    if isinstance(error.__cause__, OmegaConfBaseException):
        return f"{error.__cause__.full_key}: {first_line(error.__cause__)}"
    if isinstance(error, OmegaConfBaseException):
        return f"{error.full_key}: {first_line(error)}"
    if isinstance(error, HydraException):
        group = re.search(r"Could not override '([^']+)'|but config group '([^']+)' does not exist", str(error))
        return _unknown_group(group[1] or group[2], conf) if group else _one_line(str(error))
    if isinstance(error, ValueError) and str(error) == "No trials are completed yet.":  # says Optuna
        return "no trial of the search came to its end; the report in the sweep's folder says why"
    if isinstance(error, ValueError) and str(error).startswith("Config group override must be"):
        return "a config group cannot be null; choose one of its members, as in model=vit (--help lists them)"
    for cause in (error, error.__cause__):  # logging wraps what it meets
        if isinstance(cause, OSError) and cause.filename:
            advice = "name another folder with hydra.run.dir=FOLDER or hydra.sweep.dir=FOLDER"
            return f"{cause.filename}: {cause.strerror}; {advice}"
    return None


def _unknown_choice(error: MissingConfigException) -> str:
    """`data/loader=ran`, where there is no such file in the group."""
    group, _, wrong = (error.missing_cfg_file or "").rpartition("/")
    if not group or not error.options:
        return _one_line(str(error))
    extra = PLUGINS.get((group, wrong))
    if extra:
        return f"{group}={wrong}: is not installed; type pip install 'vitmnist[{extra}]'"
    return f"{group}={wrong}: there is no such choice; {choices(wrong, error.options)}"


def _unknown_key(cause: OmegaConfBaseException) -> str:
    """`bach_size=3`, where the configuration has no such key."""
    known = [str(key) for key in cause.parent_node or () if key != "hydra"]
    return f"{cause.full_key}: there is no such key; {choices(str(cause.key), known)}"


def _unknown_group(key: str, conf: Path) -> str:
    """`date/loader=ram`, where there is no such group, or a group at a place that the configuration has not."""
    wrong, _, place = key.partition("@")
    groups = {file.parent.relative_to(conf).as_posix() for file in conf.rglob("*.yaml") if file.parent != conf}
    if wrong in groups:
        return (
            f"{key}: nothing that was chosen has a {wrong} at {place}; data/loader=prefetch has one at data.loader.base"
        )
    return f"{wrong}: there is no such config group; {choices(wrong, groups)}"


def _one_line(message: object) -> str:
    return " ".join(str(message).split())
