"""What was typed for training: options of Hydra, overrides in its grammar, and the run that `resume=FOLDER` names."""

from __future__ import annotations

import os
import re
from argparse import Namespace
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from vitmnist.errors import ConfigError

# The arguments that begin a run or resume it, so that the same command can be repeated.
AUTO_FORM = "hydra.run.dir=FOLDER resume=auto"

# Options of Hydra that would bypass the checks of the configuration, or load a pickle.
UNSUPPORTED = ("config-path", "config-name", "experimental-rerun")


@dataclass(frozen=True)
class Arguments:
    """The arguments of `train`.

    Args:
        options: the parsed options of Hydra's command line.
        overrides: keys and groups; `--config-dir` and `resume=FOLDER` are written as `hydra.searchpath` and
            `hydra.run.dir`.
        must_resume: the run in `hydra.run.dir` is resumed, because `resume=FOLDER` was typed.
    """

    options: Namespace
    overrides: list[str]
    must_resume: bool = False


def parse(typed: list[str]) -> Arguments:
    """What was typed; raises `ConfigError` for an unknown option, or if the arguments contradict each other."""
    # A private function, without which nothing can be trained.
    from hydra._internal.utils import get_args_parser

    options, unknown = get_args_parser().parse_known_intermixed_args(typed)
    overrides: list[str] = options.overrides
    unsupported = [f"--{name}" for name in UNSUPPORTED if getattr(options, name.replace("-", "_"))]
    if refused := unknown + unsupported:
        raise ConfigError(f"{refused[0]}: there is no such option; keys are typed without dashes, as in epochs=3")
    # It becomes an override, because the configuration is composed without Hydra's command line.
    if options.config_dir:
        config_dir = Path(options.config_dir).resolve()
        if not config_dir.is_dir():
            raise ConfigError(f"--config-dir: {options.config_dir}: there is no such folder")
        overrides.append(f"hydra.searchpath=[{quoted(config_dir.as_uri())}]")
    if options.multirun:
        overrides.append("hydra.mode=MULTIRUN")
    resume = value_of("resume", overrides)
    if resume == "auto" and not any(value_of(key, overrides) for key in ("hydra.run.dir", "hydra.sweep.dir")):
        sweep = "hydra.sweep.dir=FOLDER resume=auto"
        raise ConfigError(f"resume=auto: in which folder? Type {AUTO_FORM}, or for a sweep {sweep}")
    if resume in (None, "auto"):
        return Arguments(options, overrides)
    if options.multirun:
        raise ConfigError(
            f"-m: resume={resume} resumes one run; a sweep is resumed by its own command with hydra.sweep.dir=FOLDER "
            "resume=auto"
        )
    folder = f"hydra.run.dir={quoted(os.path.expanduser(resume))}"
    return Arguments(options, [*without_keys(overrides, ["resume"]), folder], must_resume=True)


def key_of(override: str) -> str:
    """The key or group that an override names."""
    return override.lstrip("+~").partition("=")[0]


def is_of_hydra(override: str) -> bool:
    """Whether an override is of Hydra's own configuration."""
    return key_of(override).startswith("hydra")


def without_keys(overrides: Iterable[str], keys: Collection[str]) -> list[str]:
    """The overrides of other keys."""
    return [override for override in overrides if key_of(override) not in keys]


def value_of(key: str, overrides: Iterable[str]) -> str | None:
    """The value of an override as text, without quotes; None if it was not typed or is null."""
    values = [override.partition("=")[2] for override in overrides if key_of(override) == key]
    return values[-1].strip("'\"") if values and values[-1] != "null" else None


def quoted(text: str) -> str:
    """Text as a value in Hydra's grammar; in quotes, a backslash is special before a quote and at the end."""
    if re.fullmatch(r"[\w./+-]+", text):
        return text
    return "'" + re.sub(r"(\\*)('|$)", lambda match: 2 * match[1] + (match[2] and r"\'"), text) + "'"
