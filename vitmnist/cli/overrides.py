"""`resume=FOLDER` and `resume=auto`: the command line of a run that began before.

Hydra composes the configuration before our code sees it, so what was typed for the first start is typed again for it,
with what is new behind. What may change is checked when the checkpoint is read.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import psutil
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from vitmnist.cli.messages import explain
from vitmnist.config.labels import CONF
from vitmnist.config.schema import Config
from vitmnist.config.validation import typed
from vitmnist.errors import ConfigError
from vitmnist.runtime.files import is_claimed, write_whole

RUNS = Path("outputs/runs")
NOT_AGAIN = ("resume", "repeats")  # what is not typed again; a job of a sweep that is gone on with is one run
RESUMED = "resumed.yaml"  # beside Hydra's record, which stays that of the first start


def expand(arguments: list[str]) -> list[str]:
    """The arguments for Hydra; without `resume=` they stay as they are.

    Raises:
        ConfigError: there is no such run, or `-m` was typed too.
    """
    asked = [argument for argument in arguments if argument.startswith("resume=")]
    if not asked or asked[-1] == "resume=null":
        return arguments
    if asked[-1] == "resume=":
        raise ConfigError(f"resume=: is empty; name a folder such as {RUNS}/DATE/TIME-…, or auto")
    others = [argument for argument in arguments if not argument.startswith("resume=")]
    if any(argument in ("-m", "--multirun") for argument in others):
        raise ConfigError(f"{asked[-1]}: goes on with one run, and -m begins several; leave one of them out")
    wanted = asked[-1].partition("=")[2].strip("'\"")
    if wanted == "auto":
        folder = newest_unfinished(others)
        if folder is None:
            print("resume=auto: no unfinished run of this configuration; a new one begins")
            return others
        print(f"resume=auto: goes on with {folder}")
    else:
        folder = Path(wanted).expanduser()
    again = typed_again(folder, others)
    place = json.dumps(str(folder), ensure_ascii=False)
    # The record of the first start stays as it was: nothing is written into .hydra.
    first = again[: len(again) - len(others)]
    where = arguments.index(asked[-1])  # among the other overrides, which Hydra wants side by side
    before, behind = ([one for one in part if one in others] for part in (arguments[:where], arguments[where + 1 :]))
    # A job of an experiment that is a sweep by itself is one run now.
    how = [f"hydra.run.dir={place}", "hydra.output_subdir=null", "hydra.mode=RUN", "repeats=1"]
    return [*before, *first, *how, f"resume={place}", *behind]


def compose_again(folder: Path, overrides: list[str]) -> DictConfig:
    """The configuration of a run, changed by overrides.

    Raises:
        ConfigError: the folder holds no run, or the overrides cannot be used.
    """
    with initialize_config_dir(str(CONF), version_base="1.3"):
        try:
            return compose("config", typed_again(folder, overrides))
        except Exception as error:
            raise ConfigError(explain(error, CONF) or str(error)) from error


def typed_again(folder: Path, new: list[str]) -> list[str]:
    """What was typed for a run and is not typed anew, and then what is new.

    Where another member of a group is chosen, the keys of the former go too.

    Raises:
        ConfigError: the folder holds no run.
    """
    record = next(
        (place for place in (folder / RESUMED, folder / ".hydra" / "overrides.yaml") if place.is_file()), None
    )
    if record is None:
        sweep = (folder / "multirun.yaml").is_file()
        hint = "sweep.resume= goes on with a sweep" if sweep else f"name a folder such as {RUNS}/DATE/TIME-…"
        raise ConfigError(f"{folder}: holds no run; {hint}")
    first = [str(override) for override in OmegaConf.to_container(OmegaConf.load(record)) or []]
    keys = {_key(override) for override in new}
    groups = {
        key.rpartition("@")[2].replace("/", ".")
        for key in keys
        if "/" in key or key in ("model", "optimizer", "schedule", "trainer")
    }

    def stays(override: str) -> bool:
        key = _key(override)
        dotted = key.rpartition("@")[2].replace("/", ".")
        return key not in keys and key not in NOT_AGAIN and not any(dotted.startswith(f"{group}.") for group in groups)

    return [*(override for override in first if stays(override)), *new]


def _key(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]


def remember(overrides: list[str], folder: Path) -> None:
    """Note what this sitting was typed with: where it changed something, the next one goes on from there."""
    own = [override for override in overrides if _key(override) != "resume"]
    write_whole(folder / RESUMED, OmegaConf.to_yaml(own).encode())


def after_restart(arguments: list[str]) -> list[str]:
    """What `torchrun --max-restarts` means when it types the same again: go on with what it began before.

    A run that failed before its first checkpoint begins anew; in the same folder, if one was named.
    """
    if any(argument.startswith("resume=") for argument in arguments):
        return arguments
    since = psutil.Process(os.getppid()).create_time()
    folder = newest_unfinished(arguments, since)
    if folder is None:
        for place in _named_places(arguments):
            record = place / "result.json"
            if record.exists() and record.stat().st_mtime >= since and not is_claimed(place):
                record.unlink()
        return arguments
    print(f"restarted by torchrun: goes on with {folder}")
    return with_more(arguments, f"resume={folder}")


def with_more(arguments: list[str], *more: str) -> list[str]:
    """The arguments with more overrides, beside those that there are: Hydra wants no option between them."""
    last = max(
        (place for place, argument in enumerate(arguments) if _is_override(argument)), default=len(arguments) - 1
    )
    return [*arguments[: last + 1], *more, *arguments[last + 1 :]]


def _is_override(argument: str) -> bool:
    return argument[:1] != "-" and (argument[:1] == "~" or "=" in argument)


def _named_places(overrides: list[str]) -> list[Path]:
    return [Path(override.partition("=")[2]) for override in overrides if _key(override) == "hydra.run.dir"]


def newest_unfinished(overrides: list[str], since: float = 0.0) -> Path | None:
    """The folder of the newest run that did not complete, among those of this very configuration.

    Args:
        since: seconds since 1970; runs that began before do not count.
    """
    with initialize_config_dir(str(CONF), version_base="1.3"):
        wanted = _identity(
            compose(
                "config",
                [override for override in overrides if _is_override(override)],
            )
        )
    places = _named_places(overrides) or list(RUNS.glob("*/*"))
    found = []
    for folder in places:
        checkpoints = list((folder / "checkpoints").glob("*.pt"))
        record = folder / ".hydra" / "config.yaml"
        unfinished = checkpoints and record.is_file() and not is_completed(folder) and not is_claimed(folder)
        if unfinished and record.stat().st_mtime >= since and _identity(OmegaConf.load(record)) == wanted:
            found.append((max(path.stat().st_mtime_ns for path in checkpoints), folder))
    return max(found)[1] if found else None


def _identity(composed: Any) -> Config | None:
    """The typed configuration without how to stop and resume; None where it is of another version."""
    try:
        config = typed(Config, OmegaConf.to_container(composed))  # type: ignore[arg-type]
    except ConfigError:
        return None
    config.resume, config.max_minutes = None, None
    return config


def is_completed(folder: Path) -> bool:
    """Whether a run's folder says that all its epochs were done."""
    try:
        return bool(json.loads((folder / "result.json").read_text())["status"] == "completed")
    except (OSError, ValueError, KeyError):
        return False
