"""Errors of Hydra and OmegaConf in one or two lines that name the key and what is allowed."""

from __future__ import annotations

import json
import os
import re
import shlex
import traceback

from hydra._internal.utils import get_args_parser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException, ValidationError
from yaml import MarkedYAMLError

from vitmnist.config import CONF
from vitmnist.config.schema import Config
from vitmnist.config.validation import group_at, wrong_type
from vitmnist.config.values import flatten
from vitmnist.errors import ConfigError, MissingExtraError, UnknownKeyError, UserError, allowed_names, first_line
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
    "elements of a list are overridden by their index, from 0, as in data.augment.operations.0.p=0.3; to add or remove "
    "one, type the whole list"
)
# What other exceptions say, and the message in its place.
KNOWN = {
    "No trials are completed yet.": "no trial of the search completed; the report in the sweep's folder says why",
    "Could not determine home directory": "a path begins with ~NAME, and there is no user of this name",
    "Config group override must be": "a config group cannot be null; choose one of its members, as in model=vit "
    "(--help lists them)",
}


def describe(error: BaseException, composed: DictConfig | None = None) -> Failure:
    """How an exception is reported: `classify`, and the errors of Hydra and OmegaConf.

    Args:
        composed: the configuration, if it could be composed; improves the hint for an unknown key.
    """
    message = _message(error, composed)
    return classify(error) if message is None else Failure(message)


def _message(error: BaseException, composed: DictConfig | None) -> str | None:
    """The message for a mistake in the configuration; None for other errors."""
    text, cause = " ".join(str(error).split()), error.__cause__
    if isinstance(error, UnknownKeyError) and composed is not None:
        return _unknown_key(error, composed)
    if isinstance(error, UserError):
        return None  # says all itself, also if its cause is one of those below
    if isinstance(error, MissingConfigException):
        return _unknown_member(error, text)
    if isinstance(error, OverrideParseException):
        return _unreadable(str(error.override))
    if isinstance(cause, OmegaConfBaseException):
        return _refused_override(cause)
    if isinstance(error, OmegaConfBaseException):
        return f"{error.full_key}: {first_line(error)}"
    if isinstance(error, HydraException):
        if several := re.match(r"Ambiguous value for argument '(.*?)' 1\. ", text):
            return f"{several[1]}: a list of values is a sweep, which needs -m; a number is typed without commas"
        group = re.search(r"Could not override '([^']+)'|but config group '([^']+)' does not exist", text)
        return _unknown_group(group[1] or group[2]) if group else text
    if isinstance(error, MarkedYAMLError) and (mark := error.problem_mark):
        return f"{mark.name}, line {mark.line + 1}: is not valid YAML: {error.problem}"
    if isinstance(error, ArithmeticError | RuntimeError | TypeError | ValueError):
        return _raised_by_a_library(error, text)
    return None


def _raised_by_a_library(error: Exception, text: str) -> str | None:
    frames = traceback.extract_tb(error.__traceback__)
    if any("override_parser" in frame.filename for frame in frames):
        return "an override has a range(START,STOP,STEP) of no values: all three must be finite, and STEP not 0"
    if isinstance(error, TypeError | ValueError):
        if any(frame.name == "_apply_overrides_to_config" for frame in frames):
            return LISTS  # an override deletes or names a key of a list
        if isinstance(error.__cause__, OSError):  # logging could not open its file
            return classify(error.__cause__).message
    return next((message for said, message in KNOWN.items() if text.startswith(said)), None)


def refuse_flags(arguments: list[str]) -> None:
    """Refuse `--epochs 3`, which Hydra would answer with its usage.

    Raises:
        ConfigError: an argument starts with a dash and is none of Hydra's options, or one of these lacks its partner.
    """
    if "--resolve" in arguments and not get_args_parser().parse_known_args(arguments)[0].cfg:
        raise ConfigError("--resolve: resolves what --cfg shows; type --cfg job --resolve")
    unknown = [one for one in get_args_parser().parse_known_args(arguments)[1] if one.startswith("-")]
    for flag in unknown[:1]:
        following = [*arguments[arguments.index(flag) + 1 :], "-"][0]
        typed = "true" if following.startswith(("-", "~")) or "=" in following else following
        key, _, value = flag.lstrip("-").partition("=")
        raise ConfigError(f"{flag}: keys are typed without dashes; type {key.replace('-', '_')}={value or typed}")


def _unknown_member(error: MissingConfigException, text: str) -> str:
    """`data/loader=ran`: no such member of the group."""
    group, _, wrong = (error.missing_cfg_file or "").rpartition("/")
    if extra := PLUGINS.get(f"{group}={wrong}"):  # typed, or what our own hydra/launcher=parallel builds on
        return str(MissingExtraError(f"{group}={wrong}", extra))
    if not group or not error.options:
        return text
    return f"{group}={wrong}: there is no such member; {allowed_names(wrong, error.options)}"


def _unknown_group(key: str) -> str:
    """`date/loader=ram`: no such group, or none in that package."""
    wrong, _, package = key.partition("@")
    groups = {file.parent.relative_to(CONF).as_posix() for file in CONF.glob("*/**/*.yaml")}
    if wrong in groups:
        return f"{key}: no chosen member has a {wrong} at {package}; data/loader=prefetch has one at data.loader.base"
    return f"{wrong}: there is no such config group; {allowed_names(wrong, groups)}"


def _refused_override(cause: OmegaConfBaseException) -> str:
    """`batch_size=many` or `lr=0.01`: a wrong type or an unknown key."""
    key = re.sub(r"\[(\d+)\]", r".\1", str(cause.full_key))  # an index of a list, as it is typed
    if isinstance(cause, ValidationError):
        return wrong_type(Config, cause)
    if isinstance(cause, IndexError):
        return f"{key}: there is no such element; {LISTS}"
    if not isinstance(cause, ConfigKeyError | ConfigAttributeError) or cause.parent_node is None:
        return f"{key}: {first_line(cause)}"
    if "/" in key:
        return _unknown_group(key)
    root = getattr(cause.parent_node, "_get_root", lambda: cause.parent_node)()
    unknown = UnknownKeyError(key, [str(name) for name in cause.parent_node if name != "hydra"], "VALUE")
    return str(unknown) if key.startswith("hydra.") else _unknown_key(unknown, root)


def _unreadable(override: str) -> str:
    """`data.root=~/mnist`: not in Hydra's grammar."""
    key, assigned, value = override.partition("=")
    if not assigned:
        return f"{override}: cannot be read; write KEY=VALUE"
    if group := re.fullmatch(r"(\w+/\w+)\.(\w+)", key):  # data/loader.base=disk
        package = f"{group[1].replace('/', '.')}.{group[2]}"
        return f"{override}: cannot be read; within another member a group is chosen by {group[1]}@{package}={value}"
    if key.startswith("hydra."):
        value = os.path.expanduser(value)  # Hydra would take a quoted ~ as the name of a folder
    quoted = shlex.quote(f"{key}={json.dumps(value, ensure_ascii=False)}")
    return f"{override}: cannot be read; text with characters such as ~ must be quoted, as in {quoted}"


def _unknown_key(unknown: UnknownKeyError, composed: DictConfig) -> str:
    """`lr=0.01`: looks for the last name of the key elsewhere, and in the members of groups that were not chosen."""
    section, _, leaf = unknown.key.rpartition(".")
    config = OmegaConf.masked_copy(composed, [str(key) for key in composed if key != "hydra"])
    found: dict[str, str] = {}  # keys and sections of this name, and how they are typed
    for full in flatten(OmegaConf.to_container(config)):  # type: ignore[arg-type]
        head, is_there, rest = f".{full}.".partition(f".{leaf}.")
        key = f"{head}.{leaf}".lstrip(".")
        if is_there and key != unknown.key:
            found[key] = _group_or_key(key) if rest else key
    below = [key for key in found if key.startswith(f"{section}.")]
    owners = _owners(leaf)
    group = group_at(section)
    members = owners.get(group.partition("@")[0])
    if found and (below or not members):
        meant = " or ".join([found[key] for key in below or found][:3])
        return f"{unknown.key}: there is no such key; did you mean {meant}?"
    if not owners:
        return str(unknown)
    if not members:
        group, members = next(iter(owners.items()))
        leaf = f"{group.replace('/', '.')}.{leaf}"
    hint = f"{leaf} belongs to {' and '.join(members)}; type {group}={members[0]} or leave it out"
    return f"{unknown.key}: there is no such key; {hint}"


def _group_or_key(section: str) -> str:
    group = group_at(section)
    return group if (CONF / group.partition("@")[0]).is_dir() else section


def _owners(leaf: str) -> dict[str, list[str]]:
    """The members that have a key of this name, by config group."""
    owners: dict[str, list[str]] = {}
    for file in sorted(CONF.glob("*/**/*.yaml")):
        text = file.read_text()  # a key of the file itself, or the package of a group within it
        if re.search(rf"^({leaf}:|  - .*@[\w.]*\b{leaf}\b.*:)", text, re.MULTILINE) and f"\nname: {file.stem}" in text:
            owners.setdefault(file.parent.relative_to(CONF).as_posix(), []).append(file.stem)
    return owners
