"""A sweep around any sweeper and launcher of Hydra: a failing job does not end it, a completed one is skipped.

What a sweeper returns depends on the sweeper, so the state of a sweep is what its jobs left in their folders.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from vitmnist.cli.arguments import quoted, without_keys
from vitmnist.cli.messages import describe
from vitmnist.cli.process import TrainingProcess, import_trainer
from vitmnist.cli.resume import report_if_completed
from vitmnist.config.schema import Config
from vitmnist.config.validation import validate
from vitmnist.errors import ConfigError, ExitCode, RunInterrupted, TimeLimitReached, TrainingError
from vitmnist.metrics.epoch_table import search_objective
from vitmnist.runtime.files import display_path
from vitmnist.runtime.run_folder import InUseError, folder_lock, has_checkpoint
from vitmnist.runtime.signals import StopSignal, interruption
from vitmnist.runtime.world import is_distributed
from vitmnist.tracking.result import Result
from vitmnist.tracking.runs import read_run

log = logging.getLogger(__name__)

# The override that lets a sweep run in rounds.
ROUNDS = "hydra.sweeper._target_=hydra_plugins.vitmnist_sweepers.RoundsSweeper"


def run_sweep(process: TrainingProcess, composed: DictConfig, typed: list[str]) -> None:
    """Run the jobs of a sweep by Hydra's sweeper and launcher, and write a report, also when the sweep is stopped.

    Raises:
        ConfigError: the command line or the folder cannot be used.
        TrainingError: names the jobs that failed.
        RunInterrupted: the sweep was asked to stop, or a job has reached its max_minutes, or is in use.
    """
    overrides = _prepare_sweep(process, composed, typed)
    folder = Path(composed.hydra.sweep.dir)
    stop = process.stop
    job = Job(stop)
    composer = GlobalHydra.instance().hydra
    assert composer
    try:
        composer.multirun("config", job, overrides)
    except (Exception, RunInterrupted):
        # A signal ends a process of joblib that has no job yet.
        if not stop.request:
            raise
    _write_report(folder)
    if stop.request:
        raise interruption(stop.request)
    _check_jobs(folder, job)


def _prepare_sweep(process: TrainingProcess, composed: DictConfig, typed: list[str]) -> list[str]:
    """Check a sweep, lock its folder, and return the overrides for Hydra's sweeper; raises `ConfigError`."""
    if is_distributed():
        raise ConfigError(
            "-m: is for one process, which runs the jobs of a sweep one after another; each process of "
            "torchrun would run them all. Start the sweep with python, or each of its jobs with torchrun"
        )
    # An unknown metric is an error at once.
    search_objective(composed)
    folder = Path(composed.hydra.sweep.dir)
    overrides = [*typed, f"hydra.sweep.dir={quoted(str(folder))}"]
    if composed.repeats < 1:
        raise ConfigError(f"repeats={composed.repeats}: must be at least 1")
    if composed.repeats > 1 and not _is_search(composed.hydra):
        overrides = [f"repeat={','.join(map(str, range(1, composed.repeats + 1)))}", *overrides, ROUNDS]
    again = without_keys(process.typed, ["resume", "hydra.sweep.dir"])
    again += [f"hydra.sweep.dir={quoted(display_path(folder))}", "resume=auto"]
    process.lock_folder(folder, "hydra.sweep.dir", again, must_be_new=composed.resume != "auto")
    if _is_parallel(composed.hydra):
        process.stop.lead()
    return overrides


def _check_jobs(folder: Path, job: Job) -> None:
    """Raise `TrainingError` if jobs of a sweep failed, and `RunInterrupted` if some are unfinished."""
    # A job that was refused has a record and no lock; one that was killed before its first record has a lock.
    files = [*folder.glob("*/**/.lock"), *folder.glob("*/**/result.json")]
    runs = [read_run(job_folder) for job_folder in sorted({file.parent for file in files})]
    failed = {run.folder.name for run in runs if run.status not in ("completed", "interrupted", "running")}
    if failed := failed | job.failed:
        raise TrainingError(f"{len(failed)} of {len(runs)} jobs failed: {', '.join(sorted(failed))}")
    if unfinished := [run.folder.name for run in runs if run.status != "completed"]:
        raise RunInterrupted(f"{len(unfinished)} of {len(runs)} jobs are unfinished: {', '.join(unfinished)}")


def _is_search(hydra: Any) -> bool:
    """Whether the sweeper proposes jobs from the results of others; `hydra` is its own configuration."""
    return bool(hydra.runtime.choices["hydra/sweeper"] != "basic")


def _is_parallel(hydra: Any) -> bool:
    """Whether joblib runs the jobs, in processes of its own."""
    return str(hydra.launcher._target_).endswith("JoblibLauncher")


class Job:
    """Trains a job of a sweep; Hydra calls it for each, here or in a process of a launcher.

    Args:
        stop: the stop signal of the sweep; None in a process of a launcher, which has its own.
    """

    def __init__(self, stop: StopSignal | None = None) -> None:
        self.stop = stop
        # The folders of jobs that failed in this process; some of them leave no record.
        self.failed: set[str] = set()

    def __reduce__(self) -> tuple[type[Job], tuple[()]]:
        return Job, ()

    def __call__(self, composed: DictConfig) -> float | None:
        """Train, unless this was completed before; returns what a search optimises, None if the job did not complete.

        Raises:
            RunInterrupted: the sweep was asked to stop, and not only this job by its max_minutes.
        """
        job = HydraConfig.get()
        folder = Path(job.runtime.output_dir)
        overrides = without_keys(list(job.overrides.task), ["resume"])
        stop = self.stop or _stop_signal_of_launcher()
        trainer = import_trainer()
        # A compiled step of the job before is a reference cycle that holds memory.
        gc.collect()
        try:
            # The signal may have come too late to stop the job before.
            if stop.request:
                raise interruption(stop.request)
            config = validate(Config, composed)
            # A search counts a trial that failed, and does not repeat it.
            if _is_search(job) and read_run(folder).status == "failed":
                return None
            with folder_lock(folder):
                if not report_if_completed(folder, config):
                    resume = str(folder) if has_checkpoint(folder) else None
                    trainer(replace(config, resume=resume), folder, overrides, stop).fit()
            return read_run(folder).quality(search_objective(config).name)
        except RunInterrupted as error:
            # Joblib would kill the other jobs.
            if not isinstance(error, TimeLimitReached) and not _is_parallel(job):
                raise
            log.info("job %s: %s", job.job.num, error)
        except Exception as error:
            self._record(error, composed, folder, overrides)
        if stop.is_orphan:
            # A process of joblib waits for further jobs for five minutes.
            os._exit(ExitCode.UNFINISHED)
        return None

    def _record(self, error: Exception, composed: DictConfig, folder: Path, overrides: list[str]) -> None:
        """Record why a job failed. The records of an earlier start or of another process stay."""
        failure = describe(error)
        job = HydraConfig.get().job
        log.error("job %s failed: %s", job.num, failure.message, exc_info=not failure.is_user_error)
        if isinstance(error, InUseError):
            return
        self.failed.add(folder.name)
        if not (folder / "result.json").exists():
            config: Any = OmegaConf.to_container(composed, enum_to_str=True)
            refused = Result(overrides=overrides, config=config, error=failure.message, exit_code=failure.exit_code)
            with suppress(OSError):
                refused.write(folder)


@cache
def _stop_signal_of_launcher() -> StopSignal:
    """The stop signal of a launcher's process, for all of its jobs."""
    stop = StopSignal()
    # The processes of joblib outlive their parent.
    if parent := multiprocessing.parent_process():
        stop.follow(parent.pid)  # type: ignore[arg-type]
        multiprocessing.set_start_method(None, force=True)  # Joblib's own method cannot start workers of a loader.
    return stop


def _write_report(folder: Path) -> None:
    """Write the report of a sweep, and log it as text; an error is logged too."""
    # This imports matplotlib, which takes a second.
    from vitmnist.report.write import as_text, write_report

    try:
        text = as_text(write_report([folder], folder))
        log.info("Results\n\n%s\n\nReport: %s", text, display_path(folder / "report.html"))
    except Exception as error:
        # The jobs count more than their report, which `vitmnist report` can write later.
        log.error("the report could not be written: %s", error)
