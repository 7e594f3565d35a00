"""The command line: `python train.py`, `python -m vitmnist` and `vitmnist` are the same program."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
from pathlib import Path
from typing import NoReturn

import hydra
import psutil
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from vitmnist.cli import folders, sweep
from vitmnist.cli.messages import describe
from vitmnist.cli.torchrun import connect_ranks, hydra_arguments, start_ranks
from vitmnist.config.labels import CONF
from vitmnist.errors import TrainingError
from vitmnist.report.runs import read_run
from vitmnist.runtime.imports import import_large
from vitmnist.runtime.signals import StopSignal, ignore_stopping
from vitmnist.runtime.world import SINGLE_PROCESS, World

log = logging.getLogger(__name__)

SHOW_TRACEBACK = os.environ.get("HYDRA_FULL_ERROR") == "1"

# Hydra passes nothing but the configuration to its task.
_stop = StopSignal()
_world: World = SINGLE_PROCESS


class TaskError(BaseException):
    """Carries an exception past Hydra, which would print a message of its own."""


@hydra.main(config_path=str(CONF), config_name="config", version_base="1.3")
def train(composed: DictConfig) -> float | None:
    """Train one run; Hydra calls this for a run, or for each job of a sweep, whose objective it returns."""
    began_at = time.time()
    run = import_large("vitmnist.run").run  # here, because --help needs no torch
    job = HydraConfig.get()
    folder = Path(job.runtime.output_dir)
    overrides: list[str] = OmegaConf.to_container(job.overrides.task)  # type: ignore[assignment]
    if job.mode == RunMode.MULTIRUN:
        if sweep.is_completed_job(composed, folder):
            return sweep.objective(composed, read_run(folder))
        with sweep.recorded_job(composed, folder, overrides, _stop):
            sweep.prepare_job(composed, folder)
            run(composed, folder, overrides, _stop, began_at=began_at)
            return sweep.objective(composed, read_run(folder))
        return None
    _stop.check()
    start_ranks(_world, {"folder": str(folder.absolute())})
    try:
        run(composed, folder, overrides, _stop, _world, began_at=process_began_at())
    except Exception as error:
        raise TaskError from error
    return None


def main() -> None:
    """Run the program; an exception becomes one message and an exit code, on the first rank that fails."""
    global _world  # noqa: PLW0603
    _world, folders.current = SINGLE_PROCESS, None
    # Torch takes a second to leave; a signal in that time must not make a completed run look like a failed one.
    atexit.register(ignore_stopping)
    logging.raiseExceptions = False  # a closed pipe (`| head`) must not print tracebacks of the logging module
    before = os.environ.get("HYDRA_FULL_ERROR", "0")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises its errors instead of printing them its own way
    failed: BaseException | None = None
    try:
        with _stop:
            with _stop.deferred():  # imports torch if there are several ranks
                _world = connect_ranks()
            arguments = hydra_arguments(_world, sys.argv[1:])
            if arguments is not None:
                sys.argv[1:] = arguments
                try:
                    train()
                except SystemExit as ended:  # Hydra's, after --help
                    if ended.code:
                        raise
                if not folders.current:
                    start_ranks(_world, None)
    except SystemExit:
        raise
    except TaskError as error:
        failed = error.__cause__
    except BaseException as error:
        failed = error
    finally:
        os.environ["HYDRA_FULL_ERROR"] = before
    if failed:
        end(failed)
    _world.disconnect()


def process_began_at() -> float:
    """When this process started, in seconds since 1970."""
    process, now = psutil.Process(), time.time()
    if not hasattr(time, "CLOCK_BOOTTIME"):
        return float(process.create_time())
    # psutil adds the time of the boot, which it knows to the second.
    since_boot = process.create_time() - psutil.boot_time()
    return now - float(time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot)


def end(error: BaseException) -> NoReturn:
    """Exit with one message; with a traceback as well if the program is at fault, or `HYDRA_FULL_ERROR=1`."""
    output, error = folders.current, _world.root_cause(error)
    failure = describe(error, output.config if output else None)
    if failure.status == "interrupted":
        hint = output.resume_hint(_world.size) if output else ""
        log.warning("%s%s", failure.message, hint)  # to stderr if Hydra has not configured logging yet
        sys.exit(failure.exit_code)
    if output:  # also on other ranks, which may have created the folder again after rank 0 removed it
        output.end_failed(has_begun=isinstance(error, TrainingError))
    if not _world.report_failure(error, failure.message):
        sys.exit(failure.exit_code)
    if SHOW_TRACEBACK or not failure.is_user_error:
        raise error
    print(f"error: {failure.message}", file=sys.stderr)
    sys.exit(failure.exit_code)


if __name__ == "__main__":
    main()
