"""Errors of Hydra and OmegaConf in one line, and what to set for keys that people of other trainers type."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import yaml
from hydra.errors import HydraException, MissingConfigException
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from vitmnist.cli.arguments import value_of
from vitmnist.config.compose import compose
from vitmnist.config.schema import flatten
from vitmnist.config.validation import refused_value
from vitmnist.errors import Failure, MissingExtraError, UnknownKeyError, allowed_names, classify

# The launchers of Hydra whose plugins the extra `launchers` installs.
PLUGINS = ("joblib", "submitit_local", "submitit_slurm")


def describe(error: BaseException, typed: Sequence[str] = ()) -> Failure:
    """How an exception, perhaps about the overrides `typed`, is reported: `classify`, and the errors of Hydra.

    An unknown key, an unknown member and a value of the wrong type get an advice; Hydra's other errors are shown as
    they are, in one line.
    """
    text = " ".join(str(error).split())
    cause = error.__cause__ or error.__context__
    if isinstance(error, UnknownKeyError):
        text = _unknown_key(error, typed)
    elif text.startswith("Could not override 'data'"):
        # `data=cifar10` was typed, and `data` is no group but holds groups.
        text = _unknown_key(UnknownKeyError("data", []), typed)
    elif isinstance(error, MissingConfigException):
        group, _, wrong = (error.missing_cfg_file or "").rpartition("/")
        if group == "hydra/launcher" and wrong in PLUGINS:
            # It was typed, or a launcher of conf/hydra/launcher builds on it.
            text = str(MissingExtraError(f"{group}={wrong}", "launchers"))
        elif error.options:
            text = f"{group}={wrong}: there is no such member; {allowed_names(wrong, error.options)}"
    elif isinstance(error, HydraException) and isinstance(cause, OmegaConfBaseException):
        # Hydra names the file that has the key, and no file if it was typed.
        file = re.match(r"In '(.+?)'", text)
        text = (f"{file[1]}.yaml: " if file else "") + _refused_override(cause, typed)
    elif isinstance(error, OmegaConfBaseException):
        text = refused_value(error)
    elif not isinstance(error, HydraException | yaml.YAMLError):
        return classify(error)
    return Failure(text)


def _refused_override(cause: OmegaConfBaseException, typed: Sequence[str]) -> str:
    """`batch_size=many` or `lr=0.01`: a wrong type or an unknown key."""
    # An index of a list is typed as `.0`, and OmegaConf shows it as `[0]`.
    key = re.sub(r"\[(\d+)\]", r".\1", str(cause.full_key))
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and cause.parent_node is not None:
        return _unknown_key(UnknownKeyError(key, [str(name) for name in cause.parent_node if name != "hydra"]), typed)
    return refused_value(cause)


def _unknown_key(unknown: UnknownKeyError, typed: Sequence[str]) -> str:
    """`num_workers=4`, `lr=0.01`: also looks for the last name in other sections of the default configuration."""
    leaf = re.split(r"[./]", unknown.key)[-1]
    for names, advice in familiar_keys().items():
        if leaf in names.split():
            value = value_of(unknown.key, typed) or "VALUE"
            return f"{unknown.key}: {advice.replace('{}', value)}"
    values = flatten(OmegaConf.to_container(compose([])))  # type: ignore[arg-type]
    near = [key for key in values if f".{key}".endswith(f".{leaf}") and key != unknown.key]
    return f"{unknown.key}: there is no such key; did you mean {' or '.join(near[:3])}?" if near else str(unknown)


def familiar_keys() -> dict[str, str]:
    """Advice for keys that people of other trainers type, by names that are separated by spaces."""
    table: dict[str, str] = yaml.safe_load(Path(__file__).with_name("familiar_keys.yaml").read_text(encoding="utf-8"))
    return table
