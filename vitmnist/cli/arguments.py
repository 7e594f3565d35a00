"""Turns the typed arguments into those for Hydra, and finds what `resume=` resumes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from vitmnist.cli.overrides import check_name, config_dir_of, key_of, quoted, searchpath, split, value_of
from vitmnist.cli.resume import RUNS, SEVERAL, recorded_config
from vitmnist.config.schema import Config
from vitmnist.errors import ConfigError
from vitmnist.runtime.files import display_path

MULTIRUN = {"-m", "--multirun"}
AUTO_FORM = "hydra.run.dir=FOLDER resume=auto"


@dataclass(frozen=True)
class Resume:
    """What to resume.

    Args:
        typed: overrides on top of the recorded values of a run.
        config: these values with the overrides; None with `resume=auto`, which names a folder that Hydra resolves.
    """

    typed: list[str]
    config: Config | None = None


def for_hydra(arguments: list[str]) -> tuple[list[str], Resume | None]:
    """The arguments for Hydra, and what they resume, if anything.

    Raises:
        ConfigError: there is no such run, or the arguments contradict each other.
    """
    options, overrides = split(arguments)
    resume = value_of("resume", overrides)
    new = [override for override in overrides if key_of(override) != "resume"]
    if resume is None:
        return [*new, *options], None
    if resume == "":
        raise ConfigError(f"resume=: is empty; name a folder such as {RUNS}/DATE/TIME-…, or auto")
    typed = [*new, *searchpath(config_dir_of(options))]
    if resume == "auto":
        if not any(value_of(key, new) for key in ("hydra.run.dir", "hydra.sweep.dir")):
            sweep = "hydra.sweep.dir=FOLDER resume=auto"
            raise ConfigError(f"resume=auto: in which folder? Type {AUTO_FORM}, or for a sweep {sweep}")
        # The same command line is typed again and again: the values of `experiment=` and the like are recorded.
        return [*new, *options], Resume([one for one in typed if key_of(one) not in SEVERAL])
    if set(options) & MULTIRUN:
        raise ConfigError(
            f"resume={resume}: resumes one run; a sweep is resumed by its own command with hydra.sweep.dir=FOLDER "
            "resume=auto"
        )
    folder = Path(os.path.expanduser(resume))
    check_name(folder)
    if {"--cfg", "-c"} & set(options):
        raise ConfigError(f"--cfg: the configuration of a run is in {folder}/.hydra/config.yaml; leave out resume=")
    if value_of("hydra.run.dir", typed) is not None:
        raise ConfigError(f"hydra.run.dir: a run is resumed in its own folder, {display_path(folder)}; leave it out")
    # Hydra composes defaults, which are not used: a typed key may belong to a member that only the record names.
    of_hydra = [one for one in typed if one.startswith("hydra") and key_of(one) != "hydra.searchpath"]
    arguments = [*of_hydra, f"hydra.run.dir={quoted(str(folder))}", "hydra.mode=RUN", *options]
    return arguments, Resume(typed, recorded_config(folder, typed))
