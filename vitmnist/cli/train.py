"""Trains a run, or a sweep of several: arguments for Hydra in, records and an exit code out."""

from __future__ import annotations

import atexit
import gc
import logging
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

import vitmnist
from vitmnist.cli import command, folders, sweep
from vitmnist.cli.arguments import for_hydra
from vitmnist.cli.messages import describe, refuse_flags
from vitmnist.cli.torchrun import check_restarts, connect_ranks, follow_rank_0, start_other_ranks
from vitmnist.config import CONF
from vitmnist.errors import described
from vitmnist.runtime.failures import Failure
from vitmnist.runtime.files import display_path, locked
from vitmnist.runtime.signals import UNFINISHED, handled_by, ignore_stopping, interruption
from vitmnist.runtime.world import SINGLE_PROCESS, World
from vitmnist.tracking.result import Result

log = logging.getLogger(__name__)

# Hydra passes nothing but the configuration to its task.
_world: World = SINGLE_PROCESS


@hydra.main(config_path=str(CONF), config_name="config", version_base="1.3")
def train(composed: DictConfig) -> float | None:
    """Train one run; Hydra calls this for a run, or for each job of a sweep, whose objective it returns."""
    this, job = folders.command, HydraConfig.get()
    if sweep.is_parallel(job) and (parent := multiprocessing.parent_process()):
        this.stop.follow(parent.pid)  # type: ignore[arg-type]  # joblib's processes outlive it
    run = import_run()
    folder = Path(job.runtime.output_dir)
    overrides: list[str] = OmegaConf.to_container(job.overrides.task)  # type: ignore[assignment]
    if job.mode == RunMode.MULTIRUN:
        if sweep.is_completed_job(composed, folder):
            return sweep.objective(folder)
        with sweep.recorded_job(composed, folder, overrides):
            if this.stop.request:  # received too late to stop the previous job
                raise interruption(this.stop.request)
            with locked(folder):
                run(sweep.job_config(composed, folder), folder, overrides, this.stop)
                return sweep.objective(folder)
        if this.stop.is_orphan:
            os._exit(UNFINISHED)  # a process of joblib waits for further jobs for five minutes
        return None
    try:
        start_other_ranks(_world, this)
        assert this.config is not None
        this.stage = "training"
        run(this.config, folder, this.overrides, this.stop, _world)
        this.stage = "completed"
    except Exception as error:
        raise folders.TaskError from error
    return None


def import_run() -> Callable[..., Result]:
    """Import `run`, and with it torch; not before, because `--help` needs neither."""
    gc.disable()  # it would scan the objects of an import again and again
    import torch

    from vitmnist.run import run

    torch.optim.SGD([torch.zeros(1)])  # the first optimizer imports torch's compiler
    if not gc.get_freeze_count():  # a job of a sweep would examine millions of imported objects, which takes 0.3 s
        gc.freeze()
        atexit.register(gc.unfreeze)  # libraries report frozen objects as leaks
    gc.enable()
    return run


def main() -> None:
    """Run the program; an exception becomes one message and an exit code, on the first rank that fails."""
    global _world  # noqa: PLW0603
    _world, folders.command = SINGLE_PROCESS, folders.Command(sys.argv[1:])
    logging.raiseExceptions = False  # a closed pipe (`| head`) must not print tracebacks of the logging module
    before = os.environ.get("HYDRA_FULL_ERROR", "0")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises its errors instead of printing them its own way
    failed: BaseException | None = None
    try:
        with handled_by(end_at_once, signal.SIGINT):
            _world = connect_ranks()
            if not _world.is_main:
                train_as_rank_0_says()
            elif "--version" in folders.command.typed:
                print(f"vitmnist {vitmnist.__version__}")  # Hydra would print its own version
            else:
                refuse_flags(folders.command.typed)
                sys.argv[1:], folders.command.resume = for_hydra(folders.command.typed)
                check_restarts(folders.command.resume)
                train()
        sys.stdout.flush()
    except SystemExit as ended:
        if ended.code:
            raise
    except folders.TaskError as error:
        failed = error.__cause__
    except Exception as error:
        request = folders.command.stop.request if folders.command.kind != "run" else 0
        failed = interruption(request) if request else error  # the signal ends a process of joblib that has no job yet
    except BaseException as error:
        failed = error
    finally:
        os.environ["HYDRA_FULL_ERROR"] = before
        if folders.command.output:
            folders.command.output.release()
        # Torch takes a second to leave; a signal in that time must not make a completed run look like a failed one.
        atexit.register(ignore_stopping)
    if failed:
        _end(failed)
    if _world.is_main and not folders.command.output:  # after --help, or nothing was left to do
        start_other_ranks(_world, folders.command)
    _world.disconnect()


def train_as_rank_0_says() -> None:
    """Train as another rank, with the folder and the configuration of rank 0; returns if that ends without a run."""
    if followed := follow_rank_0(_world, folders.command.typed):
        folders.command.stage = "training"
        import_run()(*followed, [], folders.command.stop, _world)


def end_at_once(number: int, frame: FrameType | None) -> None:
    """End on a Ctrl-C before training, when nothing can be lost; a completed run ends by itself.

    An exception could get lost in the C++ code of a library that is being imported, and would then wait for threads,
    of which one may hang in a read.
    """
    if folders.command.stage == "completed":
        return
    hint = folders.command.resume_hint(_world.size)
    os.write(2, os.fsencode(f"interrupted{hint}\n"))  # a print could be what was interrupted
    os._exit(130)


def _end(error: BaseException) -> NoReturn:
    """Exit with one message, on the first rank that fails; says where the results are and how to resume."""
    error, output = _world.root_cause(error), folders.command.output
    failure = describe(error)
    if not failure.is_user_error and folders.command.stage == "starting":  # by Hydra's grammar, or a sweeper
        failure = Failure(f"{described(error)} (HYDRA_FULL_ERROR=1 shows the traceback)")
    if failure.status == "interrupted":
        # This goes to stderr if Hydra has not configured logging yet.
        log.warning("%s%s", failure.message, folders.command.resume_hint(_world.size))
        sys.exit(failure.exit_code)
    if output and folders.command.stage == "training" and (output.path / "result.json").exists():
        log.info("failed; results: %s", display_path(output.path))
    if not _world.report_failure(error, failure.message):
        sys.exit(failure.exit_code)
    command.end(error, failure)
