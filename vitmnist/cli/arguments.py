"""Turns the typed arguments into those for Hydra, and finds what `resume=` resumes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import psutil

from vitmnist.cli.overrides import check_name, config_dir_of, key_of, quoted, searchpath, split, value_of
from vitmnist.cli.resume import RUNS, SEVERAL, newest_unfinished, recorded_config
from vitmnist.config.schema import Config
from vitmnist.errors import ConfigError
from vitmnist.runtime.files import display_path

MULTIRUN = {"-m", "--multirun"}


@dataclass(frozen=True)
class Resume:
    """What to resume.

    Args:
        typed: overrides on top of the recorded values of a run.
        config: these values with the overrides; None with `resume=auto` and a folder, whose name Hydra resolves.
        since: Unix time in seconds; a run that was last started earlier is not resumed.
    """

    typed: list[str]
    config: Config | None = None
    since: float = 0.0


def for_hydra(arguments: list[str]) -> tuple[list[str], Resume | None]:
    """The arguments for Hydra, and what they resume, if anything.

    Raises:
        ConfigError: there is no such run, or the arguments contradict each other.
    """
    options, overrides = split(arguments)
    resume = value_of("resume", overrides)
    new, since = [override for override in overrides if key_of(override) != "resume"], 0.0
    if resume is None and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0:
        resume, since = "auto", psutil.Process(os.getppid()).create_time()  # torchrun restarts with the same arguments
    if resume is None:
        return [*new, *options], None
    if resume == "":
        raise ConfigError(f"resume=: is empty; name a folder such as {RUNS}/DATE/TIME-…, or auto")
    typed = [*new, *searchpath(config_dir_of(options))]
    if resume == "auto" and any(value_of(key, new) is not None for key in ("hydra.run.dir", "hydra.sweep.dir")):
        return [*new, *options], Resume(_without_several(typed), since=since)
    if set(options) & MULTIRUN:
        raise ConfigError(
            f"resume={resume}: resumes one run; a sweep is resumed by its own command with resume=auto "
            "hydra.sweep.dir=FOLDER"
        )
    if resume != "auto":
        return _run(Path(os.path.expanduser(resume)), typed, options)
    folder = newest_unfinished(typed, since)
    nothing = f"no unfinished run of this configuration in {RUNS}; a new one begins"
    print(f"resume=auto: {f'resuming {display_path(folder)}' if folder else nothing}")
    return _run(folder, _without_several(typed), options) if folder else ([*new, *options], None)


def _run(folder: Path, typed: list[str], options: list[str]) -> tuple[list[str], Resume]:
    """Hydra composes defaults, which are not used: a typed key may belong to a member that only the record names."""
    check_name(folder)
    if {"--cfg", "-c"} & set(options):
        raise ConfigError(f"--cfg: the configuration of a run is in {folder}/.hydra/config.yaml; leave out resume=")
    if value_of("hydra.run.dir", typed) is not None:
        raise ConfigError(f"hydra.run.dir: a run is resumed in its own folder, {display_path(folder)}; leave it out")
    of_hydra = [one for one in typed if one.startswith("hydra") and key_of(one) != "hydra.searchpath"]
    arguments = [*of_hydra, f"hydra.run.dir={quoted(str(folder))}", "hydra.mode=RUN", *options]
    return arguments, Resume(typed, recorded_config(folder, typed))


def _without_several(typed: list[str]) -> list[str]:
    """Drop `experiment=` and the like: `resume=auto` repeats the first command line, and their values are recorded."""
    return [one for one in typed if key_of(one) not in SEVERAL]
