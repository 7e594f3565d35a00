"""The folders of runs and sweeps: never one that holds records already, and none left by what was refused.

Hydra makes a folder before it asks us, so both need its callbacks.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

RECORDS = ("result.json", "checkpoints/*.pt")

_made: list[Path] = []
_going_on: list[Path] = []


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
