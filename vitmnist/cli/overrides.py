"""`resume=` and `sweep.resume=`: the overrides that a run or sweep was started with, plus new ones.

Hydra composes the configuration before our code sees it, so the command line is completed before Hydra reads it. What
may change on resuming is checked when the checkpoint is read.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

import psutil
from hydra._internal.utils import get_args_parser
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from vitmnist.cli.recorded import (
    RUNS,
    comparable,
    config_folders,
    key_of,
    last_value,
    literal,
    merge,
    recorded_overrides,
)
from vitmnist.config.compose import compose
from vitmnist.errors import ConfigError
from vitmnist.runtime.files import display_path, has_checkpoint, is_claimed
from vitmnist.runtime.imports import import_large
from vitmnist.tracking.runs import read_run

MULTIRUN = {"-m", "--multirun"}


def expand(arguments: list[str]) -> list[str]:
    """The arguments for Hydra: unchanged, or those of the run or sweep to resume and the new ones.

    Raises:
        ConfigError: there is no such run or sweep, or the arguments contradict each other.
    """
    options, overrides = split(arguments)
    resume, sweep = (last_value(key, overrides) for key in ("resume", "sweep.resume"))
    if sweep is not None:
        typed = [one for one in [*options, *overrides] if one not in MULTIRUN and key_of(one) != "sweep.resume"]
        return sweep_overrides(sweep, typed)
    new = [override for override in overrides if key_of(override) != "resume"]
    if resume is not None and set(options) & MULTIRUN:
        raise ConfigError(f"resume={resume}: resumes one run, and -m starts several; leave one of them out")
    if resume == "":
        raise ConfigError(f"resume=: is empty; name a folder such as {RUNS}/DATE/TIME-…, or auto")
    if config_dir := get_args_parser().parse_known_args(options)[0].config_dir:  # for what is composed here
        new.append(f"hydra.searchpath={literal([Path(config_dir).resolve().as_uri()])}")
    if resume == "auto":
        return [*automatic(new), *options]
    if not resume and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0:  # torchrun types the same again
        return [*automatic(new, since=psutil.Process(os.getppid()).create_time()), *options]
    return [*(run_overrides(Path(resume).expanduser(), new) if resume else new), *options]


def split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The options of Hydra's command line such as `-m`, and the overrides; Hydra does not allow them to alternate."""
    overrides = get_args_parser().parse_known_intermixed_args(arguments)[0].overrides
    return [argument for argument in arguments if argument not in overrides], overrides


def automatic(new: list[str], since: float = 0.0) -> list[str]:
    """The overrides of `resume=auto`: in a folder that is named, whatever is there continues; else the newest run.

    Args:
        since: Unix time in seconds; runs that began earlier do not count.

    Raises:
        ConfigError: the folder is in use.
    """
    named = last_value("hydra.run.dir", new)
    if named is None:
        folder = newest_unfinished(new, since)
        nothing = "no unfinished run of this configuration; a new one begins"
        print(f"resume=auto: {f'resuming {display_path(folder)}' if folder else nothing}")
        return run_overrides(folder, new) if folder else new
    folder = Path(named).expanduser()
    if not folder.is_dir() or _began(folder) < since:
        print(f"resume=auto: {display_path(folder)} holds no run; a new one begins")
        return new
    if is_claimed(folder):
        raise ConfigError(f"resume=auto: {display_path(folder)} is in use by another process; wait for it, or stop it")
    if not _is_damaged(folder) and _continues(folder):
        print(f"resume=auto: resuming {display_path(folder)}")
        return run_overrides(folder, new)
    reason = "only damaged checkpoints" if _damaged_checkpoints(folder) else "no checkpoint yet"
    print(f"resume=auto: {reason}; starting again in {display_path(folder)}")
    return [*new, f"resume={literal(str(folder))}"]


def run_overrides(folder: Path, new: list[str]) -> list[str]:
    """The overrides that resume a run in its folder, or start it again if it has no checkpoint.

    Raises:
        ConfigError: the folder holds no run, or all its checkpoints are damaged.
    """
    place = literal(str(folder))
    continues = _continues(folder)
    if not continues and (damaged := _damaged_checkpoints(folder)):
        names = ", ".join(path.name for path in damaged)
        raise ConfigError(
            f"{folder}: has only damaged checkpoints ({names}); resume=auto {shlex.quote(f'hydra.run.dir={folder}')}, "
            "with the overrides of the run, starts it again"
        )
    # A job of a sweep is resumed as a single run.
    again = [f"hydra.run.dir={place}", "hydra.mode=RUN", "repeats=1", f"resume={place}"]
    if continues:
        again.append("hydra.output_subdir=null")  # the record in .hydra stays that of the first start
    return merge(recorded_overrides(folder), [*new, *again])


def sweep_overrides(folder_name: str, rest: list[str]) -> list[str]:
    """The overrides that resume a sweep; `rest` is what else was typed.

    Raises:
        ConfigError: there is no such sweep, or something else was typed.
    """
    typed = f"sweep.resume={folder_name}"
    if not folder_name:
        raise ConfigError(f"{typed}: is empty; name a folder such as outputs/sweeps/DATE/TIME-…")
    if rest:
        raise ConfigError(f"{typed}: resumes that sweep as it was started; leave out {' '.join(rest)}")
    folder = Path(folder_name).expanduser()
    if not (folder / "multirun.yaml").is_file():
        is_run = (folder / ".hydra").is_dir()
        hint = "resume= resumes a single run" if is_run else "name a folder such as outputs/sweeps/DATE/TIME-…"
        raise ConfigError(f"{typed}: holds no sweep over listed values; {hint}")
    recorded: Any = OmegaConf.to_container(OmegaConf.load(folder / "multirun.yaml").hydra.overrides)
    # No task override is added: the records of the jobs and the names of their folders stay the same.
    again = [
        f"hydra.sweep.dir={literal(str(folder))}",
        "hydra.callbacks.outputs.resume_sweep=true",
        "hydra.mode=MULTIRUN",
    ]
    if searchpath := config_folders(folder / "multirun.yaml"):
        again.append(searchpath)
    return merge([*recorded["task"], *recorded["hydra"]], again)


def _is_damaged(folder: Path) -> bool:
    """Whether all checkpoints of a run are damaged, which are then renamed to `*.damaged`."""
    if not has_checkpoint(folder):
        return False
    storage = import_large("vitmnist.checkpoint.storage")
    try:
        storage.load(folder)
    except storage.DamagedError as error:
        print(error)
        return True
    return False


def _continues(folder: Path) -> bool:
    """Whether a run in this folder is resumed, or is completed, rather than started again."""
    return has_checkpoint(folder) or read_run(folder).status == "completed"


def _damaged_checkpoints(folder: Path) -> list[Path]:
    return sorted(folder.glob("checkpoints/*.pt.damaged"))


def newest_unfinished(overrides: list[str], since: float = 0.0) -> Path | None:
    """The folder of the newest run of this configuration that can be resumed. Prints why others cannot.

    Args:
        since: Unix time in seconds; runs that began earlier do not count.
    """
    own = comparable(compose(overrides))
    found = []
    for folder in sorted(path for path in RUNS.glob("*/*") if path.is_dir()):
        if reason := _not_resumable(folder, own, since):
            print(f"resume=auto: not {display_path(folder)}: {reason}")
        else:
            found.append((max(path.stat().st_mtime_ns for path in folder.glob("checkpoints/*.pt")), folder))
    for _, folder in sorted(found, reverse=True):
        if not _is_damaged(folder):
            return folder
        print(f"resume=auto: not {display_path(folder)}: all its checkpoints are damaged")
    return None


def _not_resumable(folder: Path, own: dict[str, Any], since: float) -> str | None:
    """Why `resume=auto` does not take a run; None if it does."""
    record = folder / ".hydra" / "config.yaml"
    try:
        loaded = OmegaConf.load(record)
        recorded = comparable(loaded) if isinstance(loaded, DictConfig) and loaded else None
    except FileNotFoundError:
        known = f"its .hydra is missing; resume={display_path(folder)} reads the checkpoint instead"
        return known if has_checkpoint(folder) else "it holds no run"
    except (OSError, ValueError, YAMLError, OmegaConfBaseException):
        recorded = None
    if recorded is None:
        return f"warning: {record.name} is damaged; resume={display_path(folder)} reads the checkpoint instead"
    if differing := [key for key in {**own, **recorded} if own.get(key) != recorded.get(key)]:
        return f"it has another {', '.join(differing[:3])}{', …' * (len(differing) > 3)}"
    if _began(folder) < since:
        return "it is older than this torchrun"
    if read_run(folder).status == "completed":
        return "it is completed"
    if is_claimed(folder):
        return "it is in use by another process"
    return None if has_checkpoint(folder) else "it has no checkpoint"


def _began(folder: Path) -> float:
    """When a run was first started in a folder: Unix time in seconds."""
    record = folder / ".hydra" / "config.yaml"
    return record.stat().st_mtime if record.exists() else folder.stat().st_mtime
