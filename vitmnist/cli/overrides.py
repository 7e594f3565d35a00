"""`resume=` and `sweep.resume=`: the overrides that a run or sweep was started with, plus new ones.

Hydra composes the configuration before our code sees it, so the command line is completed before Hydra reads it. What
may change on resuming is checked when the checkpoint is read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
from hydra._internal.utils import get_args_parser
from omegaconf import DictConfig, OmegaConf
from yaml import YAMLError

from vitmnist.cli.messages import describe
from vitmnist.config.compose import compose
from vitmnist.config.labels import RESUMED, flatten, is_under, resolved
from vitmnist.errors import ConfigError
from vitmnist.report.runs import read_run
from vitmnist.runtime.files import display_path, is_claimed

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
    folder = Path(resume).expanduser() if resume else None
    if resume == "auto":
        folder = newest_unfinished(new)
        nothing = "no unfinished run of this configuration; a new one begins"
        print(f"resume=auto: {f'resuming {display_path(folder)}' if folder else nothing}")
    elif not resume and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0:
        folder = _run_before_restart(new)
    return [*(run_overrides(folder, new) if folder else new), *options]


def split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The options of Hydra's command line such as `-m`, and the overrides; Hydra does not allow them to alternate."""
    overrides = get_args_parser().parse_known_intermixed_args(arguments)[0].overrides
    return [argument for argument in arguments if argument not in overrides], overrides


def run_overrides(folder: Path, new: list[str]) -> list[str]:
    """The overrides that resume a run in its folder."""
    place = quoted(folder)
    # The record in .hydra stays that of the first start. A job of a sweep is resumed as a single run.
    mode = ["hydra.output_subdir=null", "hydra.mode=RUN", "repeats=1"]
    return _merged(recorded_overrides(folder), [*new, f"hydra.run.dir={place}", *mode, f"resume={place}"])


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
    again = [f"hydra.sweep.dir={quoted(folder)}", "hydra.callbacks.outputs.resume_sweep=true", "hydra.mode=MULTIRUN"]
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


def recorded_overrides(folder: Path) -> list[str]:
    """The overrides of a run's last start.

    Raises:
        ConfigError: the folder holds no run.
    """
    files = [file for file in (folder / RESUMED, folder / ".hydra" / "overrides.yaml") if file.is_file()]
    if not files:
        is_sweep = (folder / "multirun.yaml").is_file()
        hint = "sweep.resume= resumes a sweep" if is_sweep else f"name a folder such as {RUNS}/DATE/TIME-…"
        raise ConfigError(f"{folder}: holds no run; {hint}")
    try:
        recorded: Any = OmegaConf.to_container(OmegaConf.load(files[0]))
    except (OSError, ValueError, YAMLError) as error:
        raise ConfigError(f"{files[0]}: is damaged; start a new run") from error
    if not isinstance(recorded, list):
        raise ConfigError(f"{files[0]}: is damaged, it is not a list of overrides; start a new run")
    return [str(override) for override in recorded if _key(str(override)) != "resume"]


def newest_unfinished(overrides: list[str], since: float = 0.0) -> Path | None:
    """The folder of the newest run of this configuration that has a checkpoint and did not complete.

    Args:
        since: Unix time in seconds; earlier runs do not count.
    """
    own = _comparable(compose(overrides))
    found = []
    for folder in _named_folders(overrides) or RUNS.glob("*/*"):
        saved = [path.stat().st_mtime_ns for path in folder.glob("checkpoints/*.pt")]
        record = folder / ".hydra" / "config.yaml"
        if saved and record.is_file() and record.stat().st_mtime >= since:
            is_done = read_run(folder).status == "completed" or is_claimed(folder)
            if not is_done and _comparable(OmegaConf.load(record)) == own:
                found.append((max(saved), folder))
    return max(found)[1] if found else None


def quoted(path: Path) -> str:
    """A path as a value of Hydra's grammar."""
    return json.dumps(str(path), ensure_ascii=False)


def _run_before_restart(overrides: list[str]) -> Path | None:
    """The run to resume after torchrun has restarted the processes (`--max-restarts`) with the same command line."""
    since = psutil.Process(os.getppid()).create_time()
    folder = newest_unfinished(overrides, since)
    if folder:
        print(f"restarted by torchrun: resuming {display_path(folder)}")
        return folder
    # It failed before its first checkpoint and starts again, in the same folder if one was named.
    for result in (named / "result.json" for named in _named_folders(overrides)):
        if result.exists() and result.stat().st_mtime >= since and not is_claimed(result.parent):
            result.unlink()
    return None


def _comparable(composed: Any) -> dict[str, Any]:
    return {key: value for key, value in flatten(resolved(composed)).items() if key not in ("resume", "max_minutes")}


def _named_folders(overrides: list[str]) -> list[Path]:
    named = _last_value("hydra.run.dir", overrides)
    return [Path(named)] if named else []


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
