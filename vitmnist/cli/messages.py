"""Errors of Hydra and OmegaConf in one or two lines that name the key and what is allowed."""

from __future__ import annotations

import json
import os
import re
import shlex
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

from hydra._internal.utils import get_args_parser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException, ValidationError
from yaml import MarkedYAMLError

from vitmnist.config.compose import compose
from vitmnist.config.labels import CONF
from vitmnist.config.schema import Config
from vitmnist.config.validation import group_at, wrong_type
from vitmnist.errors import ConfigError, MissingExtraError, UnknownKeyError, UserError, choices, first_line
from vitmnist.runtime.failures import Failure, classify

# Members of Hydra's own groups that come with a plugin, and the extra that installs it.
PLUGINS = {
    "hydra/sweeper=optuna": "search",
    "hydra/launcher=joblib": "launchers",
    "hydra/launcher=submitit_local": "launchers",
    "hydra/launcher=submitit_slurm": "launchers",
    "hydra/launcher=ray": "ray",
}


LISTS = (
    "elements of a list are overridden by their place, from 0, as in data.augment.operations.0.p=0.3; to add or remove "
    "one, type the whole list"
)


def describe(error: BaseException, composed: DictConfig | None = None) -> Failure:
    """How an exception is reported: `classify`, and the errors of Hydra and OmegaConf.

    Args:
        composed: the configuration, if it could be composed; improves the hint for an unknown key.
    """
    message = _message(error, composed)
    return classify(error) if message is None else Failure(message)


def _message(error: BaseException, composed: DictConfig | None) -> str | None:
    """The message for a mistake in the configuration; None for other errors."""
    text, cause = str(error), error.__cause__
    if isinstance(error, UnknownKeyError) and composed is not None:
        return _unknown_key(error, composed)
    if isinstance(error, UserError):
        return None  # says all itself, also if its cause is one of those below
    if isinstance(error, MissingConfigException):
        return _unknown_choice(error)
    if isinstance(error, OverrideParseException):
        return _unreadable(str(error.override))
    if isinstance(cause, OmegaConfBaseException):
        return _refused_override(error, cause)
    if isinstance(error, OmegaConfBaseException):
        return f"{error.full_key}: {first_line(error)}"
    if isinstance(error, HydraException) and text.startswith("Ambiguous value"):
        override = first_line(error).partition("'")[2].rpartition("'")[0]
        return f"{override}: a list of values is a sweep, which needs -m; a number is typed without commas"
    if isinstance(error, HydraException):
        group = re.search(r"Could not override '([^']+)'|but config group '([^']+)' does not exist", text)
        return _unknown_group(group[1] or group[2]) if group else _one_line(text)
    if isinstance(error, TypeError | ValueError) and _is_override(error):
        return LISTS
    if isinstance(error, MarkedYAMLError) and (mark := error.problem_mark):
        return f"{mark.name}, line {mark.line + 1}: is not valid YAML: {error.problem}"
    return _invalid_value(error) if isinstance(error, ValueError) else None


def _invalid_value(error: ValueError) -> str | None:
    text, cause = str(error), error.__cause__
    if text == "No trials are completed yet.":  # Optuna
        return "no trial of the search completed; the report in the sweep's folder says why"
    if text.startswith("Config group override must be"):
        return "a config group cannot be null; choose one of its members, as in model=vit (--help lists them)"
    return classify(cause).message if isinstance(cause, OSError) else None  # logging could not open its file


def _is_override(error: BaseException) -> bool:
    """Whether Hydra failed to apply an override: it deletes or names a key of a list."""
    return any(frame.name == "_apply_overrides_to_config" for frame in traceback.extract_tb(error.__traceback__))


def refuse_flags(arguments: list[str]) -> None:
    """Refuse `--epochs 3`, which Hydra would answer with its usage.

    Raises:
        ConfigError: an argument starts with a dash and is none of Hydra's options.
    """
    flags = [argument for argument in get_args_parser().parse_known_args(arguments)[1] if argument.startswith("-")]
    if not flags:
        return
    flag, _, value = flags[0].partition("=")
    following = [*arguments[arguments.index(flags[0]) + 1 :], "-"][0]
    value = value or ("true" if following.startswith(("-", "~")) or "=" in following else following)
    override = f"{flag.lstrip('-').replace('-', '_')}={value}"
    hint = f"type {override}"
    try:
        compose([override.partition(",")[0]])  # the first value of a sweep
    except Exception as error:
        hint = _one_line(describe(error).message)
    raise ConfigError(f"{flag}: keys are typed without dashes; {hint}")


def _unknown_choice(error: MissingConfigException) -> str:
    """`data/loader=ran`: no such member of the group."""
    group, _, wrong = (error.missing_cfg_file or "").rpartition("/")
    if extra := PLUGINS.get(f"{group}={wrong}"):  # typed, or what our own hydra/launcher=parallel builds on
        return str(MissingExtraError(f"{group}={wrong}", extra))
    if not group or not error.options:
        return _one_line(error)
    return f"{group}={wrong}: there is no such choice; {choices(wrong, error.options)}"


def _unknown_group(key: str) -> str:
    """`date/loader=ram`: no such group, or none at that place."""
    wrong, _, place = key.partition("@")
    groups = {file.parent.relative_to(CONF).as_posix() for file in CONF.glob("*/**/*.yaml")}
    if wrong in groups:
        return f"{key}: no chosen member has a {wrong} at {place}; data/loader=prefetch has one at data.loader.base"
    return f"{wrong}: there is no such config group; {choices(wrong, groups)}"


def _refused_override(error: BaseException, cause: OmegaConfBaseException) -> str:
    """`batch_size=many` or `lr=0.01`: a wrong type or an unknown key."""
    key = re.sub(r"\[(\d+)\]", r".\1", str(cause.full_key))  # a place in a list, as it is typed
    if isinstance(cause, ValidationError):
        return wrong_type(Config, cause)
    if isinstance(cause, IndexError):
        return f"{key}: there is no such element; {LISTS}"
    if not isinstance(cause, ConfigKeyError | ConfigAttributeError) or cause.parent_node is None:
        return f"{key}: {first_line(cause)}"
    if "/" in key:
        return _unknown_group(key)
    typed = re.search(r"To append to your config use \+[^=]*=(.*)", str(error))  # Hydra quotes the override
    siblings = [str(name) for name in cause.parent_node if name != "hydra"]
    unknown = UnknownKeyError(key, siblings, typed[1] if typed else "VALUE")
    return str(unknown) if key.startswith("hydra.") else _unknown_key(unknown, cause.parent_node._get_root())


def _unreadable(override: str) -> str:
    """`data.root=~/mnist`: not in Hydra's grammar."""
    key, assigned, value = override.partition("=")
    if not assigned:
        return f"{override}: cannot be read; write KEY=VALUE"
    if group := re.fullmatch(r"(\w+/\w+)\.(\w+)", key):  # data/loader.base=disk
        place = f"{group[1].replace('/', '.')}.{group[2]}"
        return f"{override}: cannot be read; within another member a group is chosen by {group[1]}@{place}={value}"
    if key.startswith("hydra."):
        value = os.path.expanduser(value)  # Hydra would take a quoted ~ as the name of a folder
    quoted = shlex.quote(f"{key}={json.dumps(value, ensure_ascii=False)}")
    return f"{override}: cannot be read; text with characters such as ~ must be quoted, as in {quoted}"


def _unknown_key(unknown: UnknownKeyError, composed: DictConfig) -> str:
    """`lr=0.01`: looks for the last name of the key elsewhere, and in the members of groups that were not chosen."""
    place, _, leaf = unknown.key.rpartition(".")
    config: Any = OmegaConf.to_container(composed)
    found = [key for key in _places(config, leaf) if key != unknown.key and not key.startswith("hydra.")]
    below = [key for key in found if key.startswith(f"{place}.")]
    owners = _owners(leaf)
    group = group_at(place)
    members = owners.get(group.partition("@")[0])
    if found and (below or not members):
        meant = " or ".join(f"{key}={unknown.value}" for key in (below or found)[:3])
        return f"{unknown.key}: there is no such key; did you mean {meant}?"
    if not owners:
        return str(unknown)
    if not members:
        group, members = next(iter(owners.items()))
        leaf = f"{group.replace('/', '.')}.{leaf}"
    hint = f"{leaf} belongs to {' and '.join(members)}; type {group}={members[0]} or leave it out"
    return f"{unknown.key}: there is no such key; {hint}"


def _places(config: Mapping[str, Any], leaf: str, prefix: str = "") -> Iterator[str]:
    """The keys and config groups of this name, as they are typed."""
    for name, value in config.items():
        key = f"{prefix}{name}"
        if name == leaf:
            is_group = isinstance(value, Mapping) and (CONF / group_at(key).partition("@")[0]).is_dir()
            yield group_at(key) if is_group else key
        if isinstance(value, Mapping):
            yield from _places(value, leaf, f"{key}.")


def _owners(leaf: str) -> dict[str, list[str]]:
    """The members that have a key of this name, by config group."""
    owners: dict[str, list[str]] = {}
    for file in sorted(CONF.glob("**/*.yaml")):
        values: Any = OmegaConf.to_container(OmegaConf.load(file))
        places = [place for default in values.get("defaults", []) if isinstance(default, dict) for place in default]
        keys = {*values, *(place.partition("@")[2].partition(".")[0] for place in places)}
        if leaf in keys and values.get("name") == file.stem:  # a member; experiments have no name
            owners.setdefault(file.parent.relative_to(CONF).as_posix(), []).append(file.stem)
    return owners


def _one_line(message: object) -> str:
    return " ".join(str(message).split())
