"""Errors of Hydra and OmegaConf as one line: unknown keys, unknown members and wrong types have advice."""

import re
from traceback import walk_tb

import yaml
from hydra.errors import HydraException, MissingConfigException
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from vitmnist.config.compose import compose
from vitmnist.config.schema import dotted_keys
from vitmnist.config.validation import describe_refused_value
from vitmnist.errors import Failure, MissingExtraError, UnknownKeyError, classify_error, suggest_names

# The launchers of Hydra whose plugins the extra `launchers` installs.
LAUNCHER_PLUGINS = ("joblib", "submitit_local", "submitit_slurm")


def classify_cli_error(error: BaseException) -> Failure:
    """How an exception is reported: as `classify_error` says, or as an error of Hydra and OmegaConf.

    An unknown key, an unknown member and a value of the wrong type have advice; Hydra's other errors are shown as they
    are, in one line.
    """
    text = " ".join(str(error).split())
    cause = error.__cause__ or error.__context__
    if isinstance(error, UnknownKeyError):
        text = _unknown_key(error)
    elif isinstance(error, MissingConfigException):
        group, _, member = (error.missing_cfg_file or "").rpartition("/")
        if group == "hydra/launcher" and member in LAUNCHER_PLUGINS:
            # The plugin was typed, or a launcher in conf/hydra/launcher builds on it.
            text = str(MissingExtraError(f"{group}={member}", "launchers"))
        elif error.options:
            text = f"{group}={member}: there is no such member; {suggest_names(member, error.options)}"
    elif isinstance(error, HydraException) and isinstance(cause, OmegaConfBaseException):
        # Hydra names the file of the key, unless the key was typed.
        file = re.match(r"In '(.+?)'", text)
        text = (f"{file[1]}.yaml: " if file else "") + _refused_override(cause)
    elif isinstance(error, OmegaConfBaseException):
        text = describe_refused_value(error)
    elif not isinstance(error, HydraException | yaml.YAMLError):
        failure = classify_error(error)
        if failure.is_user_error or not _is_raised_by_hydra(error):
            return failure
        text = f"{failure.message} (HYDRA_FULL_ERROR=1 shows the traceback)"
    return Failure(text)


def _refused_override(cause: OmegaConfBaseException) -> str:
    """`batch_size=many` or `lr=0.01`: a wrong type or an unknown key."""
    # An index of a list is typed as `.0`, and OmegaConf shows it as `[0]`.
    key = re.sub(r"\[(\d+)\]", r".\1", str(cause.full_key))
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and cause.parent_node is not None:
        return _unknown_key(UnknownKeyError(key, [str(name) for name in cause.parent_node if name != "hydra"]))
    return describe_refused_value(cause)


def _unknown_key(unknown: UnknownKeyError) -> str:
    """`lr=0.01`: also looks for the last part of the key in all sections of the default configuration."""
    name = re.split(r"[./]", unknown.key)[-1]
    values = dotted_keys(OmegaConf.to_container(compose([])))  # type: ignore[arg-type]
    near = [key for key in values if f".{key}".endswith(f".{name}") and key != unknown.key]
    return f"{unknown.key}: there is no such key; did you mean {' or '.join(near[:3])}?" if near else str(unknown)


def _is_raised_by_hydra(error: BaseException) -> bool:
    """Whether Hydra or one of its parsers raised an exception. It is then about the arguments."""
    *_, (frame, _) = walk_tb(error.__traceback__)
    return frame.f_globals.get("__name__", "").partition(".")[0] in ("antlr4", "hydra", "omegaconf")
