"""Starts a run: the one of a command line or of `vitmnist.train`, or a job of a sweep."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from hydra.core.utils import env_override
from omegaconf import DictConfig, read_write

from vitmnist.cli.arguments import Arguments
from vitmnist.config import is_hydra_override
from vitmnist.config.schema import Config
from vitmnist.config.validation import validate
from vitmnist.runtime.files import display_path
from vitmnist.runtime.run_folder import lock_folder
from vitmnist.runtime.signals import StopSignal
from vitmnist.runtime.world import SINGLE_PROCESS, World
from vitmnist.tracking.result import Result
from vitmnist.tracking.resume import describe_completed, is_resumable, load_resumed_config

if TYPE_CHECKING:
    from vitmnist.trainer import Trainer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ConfiguredRun:
    """A run with a validated configuration and a locked folder; `overrides` are only recorded."""

    config: Config
    folder: Path
    overrides: list[str]


@contextmanager
def configure_run(arguments: Arguments, values: DictConfig, hydra_values: DictConfig) -> Iterator[ConfiguredRun]:
    """Load or validate the configuration of a run, and lock its folder within the block.

    Args:
        values: the composed configuration; a resumed run uses the recorded configuration instead.
        hydra_values: the section `hydra`; its `runtime.output_dir` is set.
    """
    folder = Path(hydra_values.run.dir)
    is_resumed = arguments.resume is not None
    if arguments.resume == "auto":
        is_resumed = is_resumable(folder)
        print(f"resume=auto: {'resuming' if is_resumed else 'beginning'} {display_path(folder)}")
    if is_resumed:
        config, overrides = load_resumed_config(folder, arguments.overrides)
    else:
        config, overrides = validate(Config, values), arguments.overrides
    with lock_folder(folder, refuse_existing=arguments.resume is None), env_override(hydra_values.job.env_set):
        # Hydra's launchers do the same for the jobs of a sweep.
        with read_write(hydra_values.runtime):
            hydra_values.runtime.output_dir = str(folder.absolute())
        config = replace(config, resume=str(folder) if is_resumed else None)
        recorded = [override for override in overrides if not is_hydra_override(override)]
        yield ConfiguredRun(config, folder.absolute(), recorded)


def start_run(run: ConfiguredRun, stop: StopSignal, world: World = SINGLE_PROCESS) -> Result | None:
    """Train a run and return its result. If it is completed already, print its result, and return None."""
    if message := world.broadcast_object(partial(describe_completed, run.folder, run.config)):
        if world.is_main:
            print(message)
        return None
    trainer_class = import_trainer()
    return trainer_class(run.config, run.folder, run.overrides, stop, world).fit()


@cache
def import_trainer() -> type[Trainer]:
    """Import `Trainer`, and with it torch. This is a function because `--help` needs neither."""
    # A fork server, the default of Python 3.14 on Linux, imports torch once for all workers of a loader.
    multiprocessing.set_forkserver_preload(["__main__", "vitmnist.loaders.disk"])
    # During the imports, the garbage collector would scan the imported objects again and again.
    gc.disable()
    from vitmnist.trainer import Trainer

    # Scanning millions of imported objects takes 0.3 s in each job of a sweep, and longer when the process exits. The
    # first optimizer imports Triton, which must come later: it reports frozen objects as leaks.
    gc.freeze()
    gc.enable()
    return Trainer


def log_results(folder: Path) -> None:
    """Log where the results of a run are, and how to view them."""
    log.info("Results: %s", display_path(folder))
    if any(folder.glob("events.out.tfevents.*")):
        # TensorBoard names a run by its path below `--logdir`.
        log.info("View them with\n    tensorboard --logdir %s", shlex.quote(display_path(folder.parent)))
