"""Errors of Hydra and OmegaConf in one line that names the key and what is allowed."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Sequence

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException, ValidationError
from yaml import MarkedYAMLError

from vitmnist.cli.familiar_keys import FAMILIAR_KEYS
from vitmnist.cli.overrides import key_of
from vitmnist.config import CONF
from vitmnist.config.compose import compose
from vitmnist.config.schema import Config
from vitmnist.config.validation import refused_value, wrong_type
from vitmnist.config.values import flatten
from vitmnist.errors import MissingExtraError, UnknownKeyError, allowed_names, first_line
from vitmnist.runtime.failures import Failure, classify

# Members of Hydra's own groups that come with a plugin, and the extra that installs it.
PLUGINS = {
    "hydra/launcher=joblib": "launchers",
    "hydra/launcher=submitit_local": "launchers",
    "hydra/launcher=submitit_slurm": "launchers",
}


def describe(error: BaseException, typed: Sequence[str] = ()) -> Failure:
    """How an exception, perhaps about the overrides `typed`, is reported: `classify`, and the errors of Hydra."""
    text, cause = " ".join(str(error).split()), error.__cause__ or error.__context__
    if isinstance(error, UnknownKeyError):
        return Failure(_unknown_key(error, typed))
    if isinstance(error, MissingConfigException):
        return Failure(_unknown_member(error.missing_cfg_file or "", error.options or ()) or text)
    if isinstance(error, OverrideParseException):
        return Failure(_unreadable(str(error.override)))
    if type(error) is ValueError and text.startswith("Config group override"):  # such as model=null
        return Failure(f"{first_line(error)}; type GROUP=NAME, as data/augment=none")
    if "${experiment}_${model}" in text:  # in the defaults of conf/config.yaml
        return Failure("model is missing; type model=NAME")
    if text.startswith("Could not override 'data'"):  # such as data=cifar10: there are only groups in `data`
        return Failure(_unknown_key(UnknownKeyError("data", []), typed))
    if isinstance(error, HydraException) and isinstance(cause, OmegaConfBaseException):
        file = re.match(r"In '(.+?)'", text)  # that has the key; otherwise it was typed
        return Failure((f"{file[1]}.yaml: " if file else "") + _refused_override(cause, typed))
    if isinstance(error, HydraException):
        return Failure(text)
    if isinstance(error, OmegaConfBaseException):
        return Failure(refused_value(error))
    if isinstance(error, MarkedYAMLError) and (mark := error.problem_mark):
        return Failure(f"{mark.name}, line {mark.line + 1}: is not valid YAML: {error.problem}")
    return classify(error)


def _unknown_member(wanted: str, members: Iterable[str]) -> str | None:
    """`data/loader=ran`: no such member of the group; None if the group has none, as of `experiment=a/b`."""
    group, _, wrong = wanted.rpartition("/")
    if extra := PLUGINS.get(f"{group}={wrong}"):  # typed, or what our own hydra/launcher=parallel builds on
        return str(MissingExtraError(f"{group}={wrong}", extra))
    return f"{group}={wrong}: there is no such member; {allowed_names(wrong, members)}" if members else None


def _refused_override(cause: OmegaConfBaseException, typed: Sequence[str]) -> str:
    """`batch_size=many` or `lr=0.01`: a wrong type or an unknown key."""
    key = re.sub(r"\[(\d+)\]", r".\1", str(cause.full_key))  # an index of a list, as it is typed
    if isinstance(cause, ValidationError):
        return wrong_type(Config, cause)
    if "/" in key:
        groups = {file.parent.relative_to(CONF).as_posix() for file in CONF.glob("*/**/*.yaml")}
        return f"{key}: there is no such config group; {allowed_names(key, groups)}"
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and cause.parent_node is not None:
        return _unknown_key(UnknownKeyError(key, [str(name) for name in cause.parent_node if name != "hydra"]), typed)
    return f"{key}: {first_line(cause)}"


def _unknown_key(unknown: UnknownKeyError, typed: Sequence[str]) -> str:
    """`num_workers=4`, `lr=0.01`: also looks for the last name in other sections of the default configuration."""
    leaf = unknown.key.rpartition(".")[2]
    if advice := FAMILIAR_KEYS.get(leaf):
        value = next((one.partition("=")[2] for one in reversed(typed) if key_of(one) == unknown.key), "VALUE")
        return f"{unknown.key}: {advice.replace('{}', value).replace('augment=null', 'augment=none')}"
    values = flatten(OmegaConf.to_container(compose([])))  # type: ignore[arg-type]
    found = [key for key in values if f".{key}".endswith(f".{leaf}") and key != unknown.key]
    return f"{unknown.key}: there is no such key; did you mean {' or '.join(found[:3])}?" if found else str(unknown)


def _unreadable(override: str) -> str:
    """`data.root=~/mnist`: not in Hydra's grammar."""
    key, assigned, value = override.partition("=")
    if not assigned:
        return f"{override}: cannot be read; write KEY=VALUE"
    quoted = shlex.quote(f"{key}={json.dumps(value, ensure_ascii=False)}")
    return f"{override}: cannot be read; text with characters such as ~ must be quoted, as in {quoted}"
