"""Parses the command line of `train`: Hydra's options, overrides and `resume=`."""

import os
import re
import sys
from argparse import Action, ArgumentParser, Namespace
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from enum import Enum, auto
from functools import cache
from pathlib import Path

from vitmnist.config import parse_key
from vitmnist.errors import ConfigError

# Arguments that make a command repeatable: it begins a run or sweep the first time, and resumes it later.
AUTO_RESUME = "hydra.run.dir=FOLDER resume=auto"
SWEEP_AUTO_RESUME = "hydra.sweep.dir=FOLDER resume=auto"
# Options of Hydra that would bypass the validation of the configuration, or load a pickle.
UNSUPPORTED_OPTIONS = ("config-path", "config-name", "experimental-rerun")


class Resume(Enum):
    """Whether to resume a run: IF_POSSIBLE is `resume=auto`, REQUIRED is `resume=FOLDER`."""

    NEVER = auto()
    IF_POSSIBLE = auto()
    REQUIRED = auto()


@dataclass(frozen=True)
class Arguments:
    """The arguments of `train`: Hydra's options, the overrides without `resume`, and `resume`.

    `--config-dir` and the folder of `resume=FOLDER` become overrides of `hydra.searchpath` and `hydra.run.dir`.
    """

    options: Namespace
    overrides: list[str]
    resume: Resume


def parse_arguments(argv: list[str]) -> Arguments:
    """Parse the command line; raises `ConfigError` for an unknown option or contradictory arguments."""
    # This function is private, but Hydra has no public parser.
    from hydra._internal.utils import get_args_parser

    if sys.version_info >= (3, 14):
        _accept_lazy_help()
    options, unknown = get_args_parser().parse_known_intermixed_args(argv)
    overrides: list[str] = options.overrides
    unsupported = [f"--{name}" for name in UNSUPPORTED_OPTIONS if getattr(options, name.replace("-", "_"))]
    if refused := unknown + unsupported:
        raise ConfigError(f"{refused[0]}: there is no such option; keys are typed without dashes, as in epochs=3")
    if options.config_dir:
        config_dir = Path(options.config_dir).resolve()
        if not config_dir.is_dir():
            raise ConfigError(f"--config-dir: {options.config_dir}: there is no such folder")
        overrides.append(f"hydra.searchpath=[{quote(f'file://{config_dir.as_posix()}')}]")
    if options.multirun:
        overrides.append("hydra.mode=MULTIRUN")
    resume = find_value("resume", overrides)
    overrides = without_keys(overrides, ["resume"])
    if resume is None:
        return Arguments(options, overrides, Resume.NEVER)
    if resume == "auto":
        if not any(find_value(key, overrides) for key in ("hydra.run.dir", "hydra.sweep.dir")):
            raise ConfigError(f"resume=auto: in which folder? Type {AUTO_RESUME}, or for a sweep {SWEEP_AUTO_RESUME}")
        return Arguments(options, overrides, Resume.IF_POSSIBLE)
    if options.multirun:
        advice = f"a sweep is resumed by its own command with {SWEEP_AUTO_RESUME}"
        raise ConfigError(f"-m: resume={resume} resumes one run; {advice}")
    overrides.append(f"hydra.run.dir={quote(os.path.expanduser(resume))}")
    return Arguments(options, overrides, Resume.REQUIRED)


@cache
def _accept_lazy_help() -> None:
    """Let argparse of Python 3.14 accept help that is not text; Hydra 1.3 passes such help for `--shell-completion`.

    Argparse checks the help when an option is added, so the help is set afterwards.
    """
    add_argument: Callable[..., Action] = ArgumentParser.add_argument

    def add_argument_unchecked(*names: object, help: str | None = None, **options: object) -> Action:
        action = add_argument(*names, **options)
        action.help = help or action.help
        return action

    setattr(ArgumentParser, "add_argument", add_argument_unchecked)  # noqa: B010


def without_keys(overrides: Iterable[str], keys: Collection[str]) -> list[str]:
    """Remove the overrides of some keys."""
    return [override for override in overrides if parse_key(override) not in keys]


def find_value(key: str, overrides: Iterable[str]) -> str | None:
    """Return the last value typed for a key, without quotes; None if there is none or the value is `null`."""
    values = [override.partition("=")[2] for override in overrides if parse_key(override) == key]
    return values[-1].strip("'\"") if values and values[-1] != "null" else None


def quote(text: str) -> str:
    """Quote text as a value in Hydra's grammar; a backslash is special before a quote and at the end."""
    if re.fullmatch(r"[\w./+-]+", text, re.ASCII):
        return text
    return "'" + re.sub(r"(\\*)('|$)", lambda match: 2 * match[1] + (match[2] and r"\'"), text) + "'"
