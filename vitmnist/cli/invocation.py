"""What was typed for training: options and overrides of Hydra, and the run that `resume=FOLDER` names."""

from __future__ import annotations

import os
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

from hydra._internal.utils import get_args_parser

from vitmnist.cli.overrides import check_name, key_of, quoted_folder, searchpath, value_of
from vitmnist.errors import ConfigError

AUTO_FORM = "hydra.run.dir=FOLDER resume=auto"
QUESTIONS = ("help", "hydra_help", "cfg", "info", "shell_completion", "experimental_rerun")


@dataclass(frozen=True)
class Invocation:
    """The arguments of `train`.

    Args:
        arguments: all of them, the overrides first: Hydra does not allow options between them.
        options: those of Hydra's command line, parsed.
        overrides: keys and groups, with `--config-dir` as one, and without `resume=FOLDER`.
        run: the folder of the run to resume, with `resume=FOLDER`.
    """

    arguments: list[str]
    options: Namespace
    overrides: list[str]
    run: Path | None

    @property
    def is_question(self) -> bool:
        """Whether Hydra answers it, as `--help`, and nothing is trained."""
        return any(getattr(self.options, name) for name in QUESTIONS)


def parse(typed: list[str]) -> Invocation:
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
        return Invocation(arguments, options, overrides, None)
    folder = Path(os.path.expanduser(resume))
    check_name(folder)
    if options.multirun:
        raise ConfigError(
            f"resume={resume}: resumes one run; a sweep is resumed by its own command with hydra.sweep.dir=FOLDER "
            "resume=auto"
        )
    if options.cfg:
        raise ConfigError(f"--cfg: the configuration of a run is in {folder}/.hydra/config.yaml; leave out resume=")
    overrides = [one for one in overrides if key_of(one) != "resume"]
    for key in map(key_of, overrides):
        if key.startswith("hydra") and key != "hydra.searchpath":
            raise ConfigError(f"{key}: has no effect with resume={resume}, a run in its own folder; leave it out")
    return Invocation(arguments, options, overrides, folder)
