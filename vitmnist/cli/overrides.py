"""`resume=` and `sweep.resume=`: the overrides that a run or sweep was started with, plus new ones.

Hydra composes the configuration before our code sees it, so the command line is completed before Hydra reads it. What
may change on resuming is checked when the checkpoint is read.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from hydra._internal.utils import get_args_parser
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from vitmnist.cli.messages import describe
from vitmnist.config.compose import compose
from vitmnist.config.labels import RESUMED, flatten, is_under, resolved
from vitmnist.errors import ConfigError
from vitmnist.report.runs import read_run
from vitmnist.runtime.files import display_path, has_checkpoint, is_claimed
from vitmnist.runtime.imports import import_large

RUNS = Path("outputs/runs")
MULTIRUN = {"-m", "--multirun"}


def expand(arguments: list[str]) -> list[str]:
    """The arguments for Hydra: unchanged, or those of the run or sweep to resume and the new ones.

    Raises:
        ConfigError: there is no such run or sweep, or the arguments contradict each other.
    """
    options, overrides = split(arguments)
    resume, sweep = (_last_value(key, overrides) for key in ("resume", "sweep.resume"))
    if sweep is not None:
        typed = [one for one in [*options, *overrides] if one not in MULTIRUN and _key(one) != "sweep.resume"]
        return sweep_overrides(sweep, typed)
    new = [override for override in overrides if _key(override) != "resume"]
    if resume is not None and set(options) & MULTIRUN:
        raise ConfigError(f"resume={resume}: resumes one run, and -m starts several; leave one of them out")
    if resume == "":
        raise ConfigError(f"resume=: is empty; name a folder such as {RUNS}/DATE/TIME-…, or auto")
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
    named = _last_value("hydra.run.dir", new)
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
    return _merged(recorded_overrides(folder), [*new, *again])


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
    return _merged([*recorded["task"], *recorded["hydra"]], again)


def compose_again(folder: Path, overrides: list[str]) -> DictConfig:
    """The configuration of a recorded run, with new overrides.

    Raises:
        ConfigError: the folder holds no run, or the overrides cannot be used.
    """
    try:
        return compose(_merged(recorded_overrides(folder), overrides))
    except Exception as error:
        raise ConfigError(describe(error).message) from error


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


def recorded_overrides(folder: Path) -> list[str]:
    """The overrides that compose the configuration of a run's last start, also if files in `conf/` have changed since.

    Raises:
        ConfigError: the folder holds no run, or neither its records nor its checkpoint can be read.
    """
    typed = _typed_overrides(folder)
    places = [f"file://{place}" for place in _config_folders(folder)]
    if places and _last_value("hydra.searchpath", typed) is None:
        typed.append(f"hydra.searchpath={literal(places)}")
    typed_keys = [_dotted(override) for override in typed]
    kept = [
        f"{key}={literal(value)}" for key, value in _changed_values(folder, places).items() if key not in typed_keys
    ]
    if kept:
        message = f"the configuration files have changed since {display_path(folder)} began, which keeps"
        print(f"note: {message} {', '.join(kept)}", file=sys.stderr)
    return [*typed, *kept]


def _config_folders(folder: Path) -> list[str]:
    """The folders of `--config-dir` with which a run began."""
    with suppress(OSError, ValueError, YAMLError, OmegaConfBaseException):
        sources: Any = OmegaConf.load(folder / ".hydra" / "hydra.yaml").hydra.runtime.config_sources
        return [source.path for source in sources if source.provider == "command-line"]
    return []


def _changed_values(folder: Path, places: list[str]) -> dict[str, Any]:
    """The recorded values of keys for which the overrides of a run's first start give other ones today."""
    try:
        recorded: Any = OmegaConf.load(folder / ".hydra" / "config.yaml")
        first: Any = OmegaConf.to_container(OmegaConf.load(folder / ".hydra" / "overrides.yaml"))
        before = _comparable(recorded)
    except (OSError, ValueError, AttributeError, YAMLError, OmegaConfBaseException):
        return {}
    searched = [f"hydra.searchpath={literal(places)}"] if places else []
    now = _comparable(compose([*(one for one in first if _key(one) != "resume"), *searched]))
    return {key: value for key, value in before.items() if key in now and now[key] != value}


def literal(value: Any) -> str:
    """A plain value in Hydra's grammar."""
    if isinstance(value, list):
        return f"[{','.join(map(literal, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{literal(inner)}" for key, inner in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False)


def _typed_overrides(folder: Path) -> list[str]:
    """The overrides of a run's last start: of its records, or of its checkpoint if these are lost; raises as above."""
    damaged = None
    for file in (folder / RESUMED, folder / ".hydra" / "overrides.yaml"):
        with suppress(FileNotFoundError, NotADirectoryError):
            try:
                recorded: Any = OmegaConf.to_container(OmegaConf.create(file.read_text()))
            except (ValueError, YAMLError, OmegaConfBaseException):  # UnicodeDecodeError is a ValueError
                recorded = None
            if isinstance(recorded, list):
                return [str(override) for override in recorded if _key(str(override)) != "resume"]
            damaged = file
    if has_checkpoint(folder):
        storage = import_large("vitmnist.checkpoint.storage")
        saved = storage.load(folder)["overrides"]
        print(f"{display_path(damaged or folder / '.hydra')}: is damaged or missing; its checkpoint has the overrides")
        return [override for override in saved if _key(override) != "resume"]
    if damaged:
        raise ConfigError(f"{damaged}: is damaged; start a new run")
    is_sweep = (folder / "multirun.yaml").is_file()
    hint = "sweep.resume= resumes a sweep" if is_sweep else f"name a folder such as {RUNS}/DATE/TIME-…"
    raise ConfigError(f"{folder}: holds no run; {hint}")


def newest_unfinished(overrides: list[str], since: float = 0.0) -> Path | None:
    """The folder of the newest run of this configuration that can be resumed. Prints why others cannot.

    Args:
        since: Unix time in seconds; runs that began earlier do not count.
    """
    own = _comparable(compose(overrides))
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
        recorded = _comparable(loaded) if isinstance(loaded, DictConfig) and loaded else None
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


def _comparable(composed: Any) -> dict[str, Any]:
    left_out = ("resume", "max_minutes", "stop_signal")
    return {key: value for key, value in flatten(resolved(composed)).items() if key not in left_out}


def _last_value(key: str, overrides: Iterable[str]) -> str | None:
    """The value of an override; None if it was not typed or is null."""
    values = [one.partition("=")[2].strip("'\"") for one in overrides if _key(one) == key]
    return values[-1] if values and values[-1] != "null" else None


def _merged(recorded: list[str], new: list[str]) -> list[str]:
    """`new` behind those of `recorded` that it does not replace; another member of a group replaces its keys too."""
    replaced = [_dotted(override) for override in new]
    return [*(override for override in recorded if not is_under(_dotted(override), replaced)), *new]


def _key(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]


def _dotted(override: str) -> str:
    """The place in the configuration that an override sets: `data.loader` for `data/loader=ram`."""
    return _key(override).rpartition("@")[2].replace("/", ".")
