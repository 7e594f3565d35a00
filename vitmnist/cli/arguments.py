"""The arguments for Hydra, made of those that were typed: what `resume=` and `sweep.resume=` mean."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import psutil
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob
from hydra.errors import HydraException

from vitmnist.cli.overrides import check_name, config_dir_of, key_of, quoted, searchpath, split, value_of
from vitmnist.cli.resume import RUNS, SEVERAL, is_group, newest_unfinished, recorded_config
from vitmnist.config.schema import Config
from vitmnist.errors import ConfigError
from vitmnist.runtime.files import display_path
from vitmnist.runtime.records import UnreadableError, read_yaml

MULTIRUN = {"-m", "--multirun"}
SECTIONS = {field.name for field in fields(Config)}


@dataclass(frozen=True)
class Resume:
    """A run to resume.

    Args:
        typed: overrides on top of its recorded values.
        config: these values with the overrides; None with `resume=auto` and `hydra.run.dir`, which Hydra resolves.
        since: Unix time in seconds; a run that was last started earlier is not resumed.
    """

    typed: list[str]
    config: Config | None = None
    since: float = 0.0


def for_hydra(arguments: list[str]) -> tuple[list[str], Resume | None]:
    """The arguments for Hydra, and the run that they resume, if any.

    Raises:
        ConfigError: there is no such run or sweep, or the arguments contradict each other.
    """
    options, overrides = split(arguments)
    resume, sweep = (value_of(key, overrides) for key in ("resume", "sweep.resume"))
    if sweep is not None:
        return _sweep(sweep, [one for one in overrides if key_of(one) != "sweep.resume"], options), None
    new, since = [override for override in overrides if key_of(override) != "resume"], 0.0
    if resume is None and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0:
        resume, since = "auto", psutil.Process(os.getppid()).create_time()  # torchrun types the same again
    if resume is None:
        return [*new, *options], None
    if resume == "":
        raise ConfigError(f"resume=: is empty; name a folder such as {RUNS}/DATE/TIME-…, or auto")
    if set(options) & MULTIRUN:
        raise ConfigError(f"resume={resume}: resumes one run, and -m starts several; leave one of them out")
    typed = [*new, *searchpath(config_dir_of(options))]
    if resume != "auto":
        return _run(Path(resume).expanduser(), typed, options)
    if value_of("hydra.run.dir", new) is None:
        folder = newest_unfinished(typed, since)
        nothing = "no unfinished run of this configuration; a new one begins"
        print(f"resume=auto: {f'resuming {display_path(folder)}' if folder else nothing}")
        return _run(folder, _without_several(typed), options) if folder else ([*new, *options], None)
    return [*new, *options], Resume(_without_several(typed), since=since)


def _run(folder: Path, typed: list[str], options: list[str]) -> tuple[list[str], Resume]:
    """Hydra composes defaults, which nobody reads: a typed key may belong to a member that only the record names."""
    check_name(folder)
    if {"--cfg", "-c"} & set(options):
        raise ConfigError(f"--cfg: the configuration of a run is in {folder}/.hydra/config.yaml; leave out resume=")
    if value_of("hydra.run.dir", typed) is not None:
        raise ConfigError(f"hydra.run.dir: a run is resumed in its own folder, {display_path(folder)}; leave it out")
    of_hydra = [one for one in typed if one.startswith("hydra") and key_of(one) != "hydra.searchpath"]
    arguments = [*of_hydra, f"hydra.run.dir={quoted(str(folder))}", "hydra.mode=RUN", *options]
    return arguments, Resume(typed, recorded_config(folder, typed))


def _without_several(typed: list[str]) -> list[str]:
    """The command line of `resume=auto` is that of the first start; what its experiment set is recorded."""
    return [one for one in typed if key_of(one) not in SEVERAL]


def _sweep(name: str, typed: list[str], options: list[str]) -> list[str]:
    """The arguments that resume a sweep.

    Raises:
        ConfigError: there is no such sweep, its record cannot be used, or a key of its jobs was typed.
    """
    shown = f"sweep.resume={name}"
    if not name:
        raise ConfigError(f"{shown}: is empty; name a folder such as outputs/sweeps/DATE/TIME-…")
    if keys := [one for one in typed if not key_of(one).startswith("hydra")]:
        raise ConfigError(
            f"{shown}: resumes that sweep as it was started; leave out {' '.join(keys)}. Only overrides of hydra and "
            "--config-dir may be typed with it"
        )
    folder = Path(name).expanduser()
    check_name(folder)
    file = folder / "multirun.yaml"
    try:
        record: Any = read_yaml(file)
        recorded = [str(one) for key in ("task", "hydra") for one in record["hydra"]["overrides"][key]]
        sources = [source for source in record["hydra"]["runtime"]["config_sources"] if source["schema"] == "file"]
        own_yaml = [str(source["path"]) for source in sources if source["provider"] == "command-line"]
    except FileNotFoundError as error:
        is_run = (folder / ".hydra").is_dir()
        hint = "resume= resumes a single run" if is_run else "name a folder such as outputs/sweeps/DATE/TIME-…"
        raise ConfigError(f"{shown}: holds no sweep over listed values; {hint}") from error
    except (UnreadableError, LookupError, TypeError) as error:
        raise ConfigError(f"{file}: is damaged; start a new sweep") from error
    if own_yaml and not config_dir_of(options):
        raise ConfigError(f"{shown}: the sweep was started with --config-dir {own_yaml[0]}; type that as well")
    taken = [one for one in recorded if _is_taken(one)]
    left_out = [one for one in recorded if one not in taken]
    if of_jobs := [one for one in left_out if not key_of(one).startswith("hydra")]:
        raise ConfigError(f"{file}: {of_jobs[0]!r:.100} cannot be resumed; start a new sweep")
    left_out = [one for one in left_out if key_of(one) not in ("hydra.sweep.dir", "hydra.mode", *map(key_of, typed))]
    if of_folders := [one for one in left_out if key_of(one).startswith("hydra.sweep.")]:
        raise ConfigError(f"{shown}: the sweep was started with {of_folders[0]!r:.1000}; type that as well")
    if left_out:
        shown = " ".join(f"{one!r:.100}" for one in left_out)
        print(f"note: ignored, because a record may not set it: {shown}; type it again if needed", file=sys.stderr)
    # No override of the jobs is added: their records and the names of their folders stay the same.
    again = [f"hydra.sweep.dir={quoted(str(folder))}", "hydra.mode=MULTIRUN"]
    return [*taken, *typed, *again, *options]


def _is_taken(recorded: str) -> bool:
    """Whether a sweep takes an override from its record: one of the schema, or of its sweeper or launcher.

    A member of a group must be a word, because a path could lead to a foreign file. Of sweeper and launcher only
    numbers and booleans are taken: their texts can name functions and commands. No interpolation is resolved.
    """
    try:
        override = OverridesParser.create().parse_override(recorded)
    except HydraException:
        return False
    key, value = override.key_or_group, recorded.partition("=")[2]
    section, package = (re.split("[./]", one)[0] for one in (key, override.package or key))
    if "$" in recorded or key in ("resume", "sweep.resume"):  # `$\{` becomes `${`
        return False
    if isinstance(override.value(), Glob):  # would look for files
        return False
    if is_group(key):
        is_other = override.package is None and key in (*SEVERAL, "hydra/sweeper", "hydra/launcher")
        return ({section, package} <= SECTIONS or is_other) and re.fullmatch(r"[\w,-]+", value) is not None
    if key.startswith(("hydra.sweeper.", "hydra.launcher.")):
        return (
            recorded.startswith("hydra.") and "_target_" not in key and isinstance(override.value(), int | float | None)
        )
    return section in SECTIONS
