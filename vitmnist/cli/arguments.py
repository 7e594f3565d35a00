"""What was typed for training: options of Hydra, overrides in its grammar, and the run that `resume=FOLDER` names."""

from __future__ import annotations

import os
import re
import unicodedata
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser

from vitmnist.errors import ConfigError

AUTO_FORM = "hydra.run.dir=FOLDER resume=auto"
FOLDERS = ("hydra.run.dir", "hydra.sweep.dir", "resume")
QUESTIONS = ("help", "hydra_help", "cfg", "info", "shell_completion", "experimental_rerun")


@dataclass(frozen=True)
class Arguments:
    """The arguments of `train`.

    Args:
        typed: all of them, the overrides first: Hydra does not allow options between them.
        options: those of Hydra's command line, parsed.
        overrides: keys and groups, with `--config-dir` as one, and without `resume=FOLDER`.
        run: the folder of the run to resume, with `resume=FOLDER`.
    """

    typed: list[str]
    options: Namespace
    overrides: list[str]
    run: Path | None

    @property
    def is_question(self) -> bool:
        """Whether Hydra answers it, as `--help`, and nothing is trained."""
        return any(getattr(self.options, name) for name in QUESTIONS)


def parse(typed: list[str]) -> Arguments:
    """What was typed; raises `ConfigError` for an unknown option, or if the arguments contradict each other."""
    options, unknown = get_args_parser().parse_known_intermixed_args(typed)
    for flag in unknown:
        raise ConfigError(f"{flag}: there is no such option; keys are typed without dashes, as in epochs=3")
    overrides = [quoted_folder(override) for override in options.overrides]
    arguments = [*overrides, *(argument for argument in typed if argument not in options.overrides)]
    if options.config_dir and not Path(options.config_dir).is_dir():
        raise ConfigError(f"--config-dir: {options.config_dir}: there is no such folder")
    if options.config_dir and "hydra.searchpath" in map(key_of, overrides):
        raise ConfigError("--config-dir, hydra.searchpath: type one of them; hydra.searchpath=[A,B] is for several")
    overrides += searchpath(options.config_dir)
    resume = value_of("resume", overrides)
    if resume == "auto" and not any(value_of(key, overrides) for key in ("hydra.run.dir", "hydra.sweep.dir")):
        sweep = "hydra.sweep.dir=FOLDER resume=auto"
        raise ConfigError(f"resume=auto: in which folder? Type {AUTO_FORM}, or for a sweep {sweep}")
    if resume in (None, "auto"):
        return Arguments(arguments, options, overrides, None)
    folder = Path(os.path.expanduser(resume))
    check_name(folder)
    if options.multirun:
        raise ConfigError(
            f"resume={resume}: resumes one run; a sweep is resumed by its own command with hydra.sweep.dir=FOLDER "
            "resume=auto"
        )
    if options.cfg:
        raise ConfigError(f"--cfg: the configuration of a run is in {folder}/.hydra/config.yaml; leave out resume=")
    overrides = without_keys(overrides, ["resume"])
    for key in map(key_of, overrides):
        if key.startswith("hydra") and key != "hydra.searchpath":
            raise ConfigError(f"{key}: has no effect with resume={resume}, a run in its own folder; leave it out")
    return Arguments(arguments, options, overrides, folder)


def key_of(override: str) -> str:
    """The key or group that an override names."""
    return override.lstrip("+~").partition("=")[0]


def without_keys(overrides: list[str], keys: list[str]) -> list[str]:
    """The overrides of other keys."""
    return [override for override in overrides if key_of(override) not in keys]


def value_of(key: str, overrides: list[str]) -> str | None:
    """The value of an override as text; None if it was not typed or is null."""
    typed = [override for override in overrides if key_of(override) == key]
    value = OverridesParser.create().parse_override(typed[-1]).value() if typed else None
    return None if value is None else str(value)


def quoted(text: str) -> str:
    """Text as a quoted string of Hydra's grammar, in which a backslash is special before a quote and at the end."""
    return "'" + re.sub(r"(\\*)('|$)", lambda match: 2 * match[1] + (match[2] and r"\'"), text) + "'"


def quoted_folder(override: str) -> str:
    """The override of a folder with its value quoted if it is not: a name may contain commas, quotes and spaces."""
    key, _, value = override.partition("=")
    is_quoted = value[:1] in ("'", '"') and value[-1:] == value[:1]
    if key not in FOLDERS or value in ("", "null") or is_quoted:
        return override
    return f"{key}={quoted(os.path.expanduser(value))}"


def searchpath(config_dir: Path | str | None) -> list[str]:
    """`--config-dir` as an override, for a configuration that is composed without Hydra's command line."""
    return [f"hydra.searchpath=[{quoted(Path(config_dir).resolve().as_uri())}]"] if config_dir else []


def check_name(folder: Path, advice: str = "rename it") -> None:
    """Raise `ConfigError` for the name of a folder that a terminal would obey, or Hydra resolve."""
    name = str(folder)
    if "${" in name or any(unicodedata.category(letter) == "Cc" for letter in name):
        raise ConfigError(f"{name!r}: the name of a folder must not contain control characters or ${{; {advice}")
