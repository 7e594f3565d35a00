"""The folders of runs and sweeps: never one that holds records already, and none left by what was refused.

Hydra makes a folder before it asks us, so both need its callbacks.
"""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import sys
from pathlib import Path
from typing import IO, Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from vitmnist.errors import ConfigError

RECORDS = ("result.json", "checkpoints/*.pt")

_made: list[Path] = []
_going_on: list[Path] = []


class ClaimedError(ConfigError):
    """A folder that another process is at work in; nothing of it may be touched."""


class NewFolders(Callback):
    """Looks at a folder before Hydra makes it; `conf/config.yaml` names this class."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Before the folder of a single run is made."""
        _made.clear()  # of a run of this process before
        if not config.resume:
            self._look_at(Path(config.hydra.run.dir), "", "hydra.run.dir", "resume")

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Before the folder of a sweep is made, and before its jobs are checked."""
        _made.clear()
        if Path(config.hydra.sweep.dir) not in _going_on:
            self._look_at(Path(config.hydra.sweep.dir), "*/", "hydra.sweep.dir", "sweep.resume")

    def _look_at(self, folder: Path, jobs: str, key: str, resume: str) -> None:
        if any(any(folder.glob(f"{jobs}{records}")) for records in RECORDS):
            # Hydra turns an exception of a callback into a warning and goes on; this it does not catch.
            sys.exit(
                f"error: {key}={folder}: holds records already, which would be overwritten; "
                f"name another folder, or go on with {resume}=FOLDER"
            )
        path = folder.absolute()
        _made[:] = [missing for missing in (path, *path.parents) if not missing.exists()]


def go_on_in(sweep: Path | None) -> None:
    """Let the next sweep of this process have a folder that holds records; None: no folder."""
    _going_on[:] = [sweep] if sweep else []


def claim(folder: Path) -> IO[str]:
    """Keep other processes out of a run's or sweep's folder until the returned file is closed, or this process ends.

    Raises:
        ClaimedError: another one is at work there.
    """
    file = (folder / ".lock").open("a")
    try:
        # Of this process alone: a lock of the other kind would live on in workers for as long as they do.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise ClaimedError(f"{folder}: another process is at work there; wait for it, or stop it") from error
    return file


def is_claimed(folder: Path) -> bool:
    """Whether another process is at work in a run's or sweep's folder."""
    try:
        claim(folder).close()
    except (ConfigError, OSError):
        return True
    return False


def take_back() -> None:
    """Remove the folder of this run or sweep, with all that is in it, if it was not there before.

    Its parents that were not there go too, unless somebody else has put something into them meanwhile.
    """
    if _made:
        shutil.rmtree(_made[0], ignore_errors=True)
        for parent in _made[1:]:
            with contextlib.suppress(OSError):
                parent.rmdir()
        _made.clear()


def take_back_unbegun_sweep() -> None:
    """The same for a sweep, unless one of its jobs has left anything."""
    if _made and not any(path.is_dir() for path in _made[0].glob("*")):
        take_back()
