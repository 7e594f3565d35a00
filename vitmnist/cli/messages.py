"""Rephrases errors of Hydra and OmegaConf in one line."""

import re
import shlex
from traceback import walk_tb

import yaml
from hydra.core.override_parser.types import Quote
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from vitmnist.cli.arguments import quote
from vitmnist.config.compose import compose
from vitmnist.config.schema import flatten_keys
from vitmnist.config.validation import describe_refused_value
from vitmnist.errors import Failure, MissingExtraError, UnknownKeyError, classify_error, suggest_names

# The equivalents of keys of Lightning, its Hydra template, timm and Keras.
EQUIVALENT_KEYS = {
    **dict.fromkeys(("fast_dev_run", "debug"), "limit_batches=10"),
    **dict.fromkeys(("limit_train_batches", "limit_val_batches", "limit_test_batches"), "limit_batches"),
    **dict.fromkeys(("accumulate_grad_batches", "gradient_accumulation_steps"), "trainer.micro_batch"),
    **dict.fromkeys(("run_name", "task_name", "experiment_name"), "name"),
}


def classify_cli_error(error: BaseException) -> Failure:
    """Classify an exception as `classify_error` does, or as an error of Hydra or OmegaConf.

    An unknown key, an unknown member or a wrong type gets a message with advice. Other messages of Hydra are joined
    into one line.
    """
    message = " ".join(str(error).split())
    cause = error.__cause__ or error.__context__
    if isinstance(error, UnknownKeyError):
        message = _describe_unknown_key(error)
    elif isinstance(error, MissingConfigException):
        group, _, member = (error.missing_cfg_file or "").rpartition("/")
        if group == "hydra/launcher" and member in ("joblib", "submitit_local", "submitit_slurm"):
            message = str(MissingExtraError(f"{group}={member}", "launchers"))
        elif error.options:
            message = f"{group}={member}: there is no such member; {suggest_names(member, error.options)}"
    elif isinstance(error, OverrideParseException) and not error.__cause__:  # The cause is the error of a function.
        message = _describe_unparsable_override(error.override)
    elif isinstance(error, HydraException) and isinstance(cause, OmegaConfBaseException):
        # If the key comes from a file and not from the command line, Hydra names the file.
        file = re.match(r"In '(.+?)'", message)
        message = (f"{file[1]}.yaml: " if file else "") + _describe_refused_override(cause)
    elif isinstance(error, OmegaConfBaseException):
        message = describe_refused_value(error)
    elif not isinstance(error, HydraException | yaml.YAMLError):
        failure = classify_error(error)
        if failure.is_user_error or not _is_raised_by_hydra(error):
            return failure
        message = f"{failure.message} (HYDRA_FULL_ERROR=1 shows the traceback)"
    return Failure(message)


def _describe_unparsable_override(override: str) -> str:
    """Describe an override that is outside Hydra's grammar, such as `data.root=~/data`."""
    if not (match := re.fullmatch(r"(\S+?)=(.*)", override, re.DOTALL)):
        return f"{override}: must be KEY=VALUE, without spaces around the sign"
    quoted = f"{match[1]}=" + quote(match[2], Quote.double)
    return f"{override}: cannot be parsed; quote text with special characters: {shlex.quote(quoted)}"


def _describe_refused_override(cause: OmegaConfBaseException) -> str:
    """Describe an override with a wrong type (`batch_size=many`) or an unknown key (`lr=0.01`)."""
    # The index of a list is `.0` in an override, but `[0]` in messages of OmegaConf.
    key = re.sub(r"\[(\d+)\]", r".\1", str(cause.full_key))
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and cause.parent_node is not None:
        siblings = [str(name) for name in cause.parent_node if name != "hydra"]
        return _describe_unknown_key(UnknownKeyError(key, siblings))
    return describe_refused_value(cause)


def _describe_unknown_key(error: UnknownKeyError) -> str:
    """Describe an unknown key, and suggest keys of any section with the same last part, such as `optimizer.lr`."""
    name = re.split(r"[./]", error.key)[-1]
    if name in EQUIVALENT_KEYS:
        return f"{error.key}: there is no such key; set {EQUIVALENT_KEYS[name]}"
    values = flatten_keys(OmegaConf.to_container(compose([])))  # type: ignore[arg-type]
    matches = [key for key in values if f".{key}".endswith(f".{name}") and key != error.key]
    return f"{error.key}: there is no such key; did you mean {' or '.join(matches[:3])}?" if matches else str(error)


def _is_raised_by_hydra(error: BaseException) -> bool:
    """Whether Hydra or its parser raised the exception, because of the arguments."""
    *_, (frame, _) = walk_tb(error.__traceback__)
    return frame.f_globals.get("__name__", "").partition(".")[0] in ("antlr4", "hydra", "omegaconf")
