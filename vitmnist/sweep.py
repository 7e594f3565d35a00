"""What surrounds the jobs of a sweep; Hydra calls it because `conf/config.yaml` names it."""

from __future__ import annotations

import atexit
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig


class SweepFolder(Callback):
    """Leaves no folder behind where Hydra refuses a sweep before its first job."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Hydra makes the folder after this, and checks the jobs after that."""
        atexit.register(_remove_if_nothing_ran, Path(config.hydra.sweep.dir).absolute())


def _remove_if_nothing_ran(folder: Path) -> None:
    record = folder / "multirun.yaml"
    if record.exists() and list(folder.iterdir()) == [record]:
        record.unlink()
        folder.rmdir()
