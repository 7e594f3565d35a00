"""Taking back the folders of a run or a sweep that was refused; Hydra makes them before it asks us."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

_made: list[Path] = []


class NewFolders(Callback):
    """Remembers which folders Hydra is about to make. Hydra calls it because `conf/config.yaml` names it."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Before the folder of a single run is made."""
        self._remember(config.hydra.run.dir)

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Before the folder of a sweep is made, and before its jobs are checked."""
        self._remember(config.hydra.sweep.dir)

    def _remember(self, folder: str) -> None:
        path = Path(folder).absolute()
        _made[:] = [missing for missing in (path, *path.parents) if not missing.exists()]


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
