"""A sweep around any sweeper and launcher of Hydra: a failing job does not end it, a completed one is skipped.

What a sweeper returns depends on the sweeper, so the state of a sweep is what its jobs left in their folders.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from vitmnist.cli.arguments import quoted, value_of, without_keys
from vitmnist.cli.command import program
from vitmnist.cli.messages import describe
from vitmnist.cli.start import RECORDS, Start, import_trainer
from vitmnist.config.schema import Config
from vitmnist.config.validation import validate
from vitmnist.config.values import flatten, to_plain_dict
from vitmnist.errors import (
    ConfigError,
    DataError,
    ExitCode,
    MissingExtraError,
    RunInterrupted,
    TimeLimitReached,
    TrainingError,
)
from vitmnist.metrics.epoch_table import search_objective
from vitmnist.runtime.files import display_path
from vitmnist.runtime.run_folder import InUseError, has_checkpoint, locked
from vitmnist.runtime.signals import StopSignal, interruption
from vitmnist.runtime.world import launched
from vitmnist.tracking.result import Result, Run, choices_of, read_run

log = logging.getLogger(__name__)

ROUNDS = "hydra.sweeper._target_=hydra_plugins.vitmnist_sweepers.RoundsSweeper"


@dataclass(frozen=True)
class Sweep:
    """A sweep that is ready to run: `with sweep.reported(): sweep.multirun(sweep.job, sweep.overrides)`."""

    folder: Path
    overrides: list[str]
    job: Job
    multirun: Callable[[Job, list[str]], object]
    stop: StopSignal

    @contextmanager
    def reported(self) -> Iterator[None]:
        """Report on the jobs that the block runs, also when it is stopped.

        Raises:
            TrainingError: names the jobs that failed.
            RunInterrupted: the sweep was asked to stop, or a job has reached its max_minutes, or is in use.
        """
        try:
            yield
        except (Exception, RunInterrupted):  # a signal ends a process of joblib that has no job yet
            if not self.stop.request:
                raise
        _write_report(self.folder)
        if self.stop.request:
            raise interruption(self.stop.request)
        _check_jobs(self.folder, self.job)


def prepare_sweep(
    start: Start, composed: DictConfig, typed: list[str], multirun: Callable[[Job, list[str]], object]
) -> Sweep:
    """Check a sweep, and lock its folder; raises `ConfigError` if the command line or the folder cannot be used."""
    if launched():
        raise ConfigError(
            "-m: is for one process, which runs the jobs of a sweep one after another; each process of "
            "torchrun would run them all. Start the sweep with python, or each of its jobs with torchrun"
        )
    search_objective(composed)  # raises an error for another name
    folder, repeats = Path(composed.hydra.sweep.dir), composed.repeats
    overrides = [*typed, f"hydra.sweep.dir={quoted(str(folder))}"]
    if composed.hydra.runtime.choices["hydra/sweeper"] == "optuna" and find_spec("optuna") is None:
        raise MissingExtraError("hydra/sweeper=optuna", "search")
    if repeats < 1 or value_of("repeats", typed) not in (None, str(repeats)):
        raise ConfigError(f"repeats={value_of('repeats', typed)}: must be one whole number, at least 1")
    if repeats > 1:
        if _is_search(composed.hydra):
            raise ConfigError("repeats: is for sweeps over listed values, not for a search")
        overrides = [f"repeat={','.join(map(str, range(1, repeats + 1)))}", *overrides, ROUNDS]
    refused = () if composed.resume == "auto" else tuple(f"**/{pattern}" for pattern in RECORDS)
    start.lock_folder(folder, "hydra.sweep.dir", refused)
    start.hint = partial(_hint, folder, start.typed)
    if _is_parallel(composed.hydra):
        start.stop.lead()
    return Sweep(folder, overrides, Job(start.stop), multirun, start.stop)


def _check_jobs(folder: Path, job: Job) -> None:
    """Raise `TrainingError` if jobs of a sweep failed, and `RunInterrupted` if some are unfinished."""
    runs = [read_run(lock.parent) for lock in sorted(folder.glob("*/**/.lock"))]
    failed = {run.folder.name for run in runs if run.status not in ("completed", "interrupted", "running")}
    if failed := failed | job.failed:
        raise TrainingError(f"{len(failed)} of {len(runs)} jobs failed: {', '.join(sorted(failed))}")
    if unfinished := [run.folder.name for run in runs if run.status != "completed"]:
        raise RunInterrupted(f"{len(unfinished)} of {len(runs)} jobs are unfinished: {', '.join(unfinished)}")


def _hint(folder: Path, typed: list[str]) -> str:
    """The end of a message about an interruption: how the same command continues."""
    shown = display_path(folder)
    same = [*without_keys(typed, ["resume", "hydra.sweep.dir"]), f"hydra.sweep.dir={quoted(shown)}", "resume=auto"]
    return f"; results: {shown}, resume with\n    {program()} {shlex.join(same)}"


def _is_search(hydra: Any) -> bool:
    """Whether the sweeper proposes jobs from the results of others; `hydra` is its own configuration."""
    return bool(hydra.runtime.choices["hydra/sweeper"] != "basic")


def _is_parallel(hydra: Any) -> bool:
    """Whether joblib runs the jobs, in processes of its own."""
    return str(hydra.launcher._target_).endswith("JoblibLauncher")


class Job:
    """Trains a job of a sweep; Hydra calls it for each, here or in a process of a launcher.

    Args:
        stop: of the sweep; None in a process of a launcher, which has its own.
    """

    def __init__(self, stop: StopSignal | None = None) -> None:
        self.stop = stop
        self.failed: set[str] = set()  # folders of jobs in this process, also of those that left no record

    def __reduce__(self) -> tuple[type[Job], tuple[()]]:
        return Job, ()

    def __call__(self, composed: DictConfig) -> float | None:
        """Train, unless this was completed before; returns what a search optimises, None if the job did not complete.

        Raises:
            RunInterrupted: the sweep was asked to stop, and not only this job by its max_minutes.
        """
        job, stop = HydraConfig.get(), self.stop or _stop_signal_of_launcher()
        folder = Path(job.runtime.output_dir)
        trainer, before = import_trainer(), read_run(folder)
        differing = _differing_keys(before, composed)
        if before.status == "completed" and not differing:
            log.info("completed before")
            return before.quality(search_objective(composed).name)
        if before.status == "failed" and not differing and _is_search(job):  # so does its trial, which counts
            return None
        overrides = without_keys(list(job.overrides.task), ["resume"])
        try:
            gc.collect()  # a compiled step of the job before is a reference cycle that holds memory
            if stop.request:  # received too late to stop the previous job
                raise interruption(stop.request)
            if differing:
                raise ConfigError(
                    f"{display_path(folder)}: holds the records of another job, with another {', '.join(differing)}; "
                    "let hydra.sweep.subdir contain ${hydra.job.num}, or begin a new sweep"
                )
            with locked(folder):
                if not has_checkpoint(folder):
                    (folder / "result.json").unlink(missing_ok=True)
                resume = str(folder) if has_checkpoint(folder) else None
                config = replace(validate(Config, composed), resume=resume)
                trainer(config, folder, overrides, stop).fit()
            return read_run(folder).quality(search_objective(config).name)
        except RunInterrupted as error:
            if not isinstance(error, TimeLimitReached) and not _is_parallel(job):  # joblib would kill the other jobs
                raise
            log.info("job %s: %s", job.job.num, error)
        except Exception as error:
            self._record(error, composed, folder, overrides)
        if stop.is_orphan:
            os._exit(ExitCode.UNFINISHED)  # a process of joblib waits for further jobs for five minutes
        return None

    def _record(self, error: Exception, composed: DictConfig, folder: Path, overrides: list[str]) -> None:
        """Record why a job failed. The records of an earlier start stay, and so do those of another process."""
        failure = describe(error)
        job = HydraConfig.get().job
        log.error("job %s failed: %s", job.num, failure.message, exc_info=not failure.is_user_error)
        if isinstance(error, InUseError):
            return
        self.failed.add(folder.name)
        if not (folder / "result.json").exists():
            config: Any = OmegaConf.to_container(composed, enum_to_str=True)
            refused = Result(overrides=overrides, choices=choices_of(config), config=config)
            refused.error, refused.exit_code = failure.message, failure.exit_code
            with suppress(OSError):
                refused.write(folder)


@cache
def _stop_signal_of_launcher() -> StopSignal:
    """That of a process of a launcher, for all of its jobs."""
    stop = StopSignal()
    if parent := multiprocessing.parent_process():  # joblib's processes outlive it
        stop.follow(parent.pid)  # type: ignore[arg-type]
    return stop


def _differing_keys(before: Run, composed: DictConfig) -> list[str]:
    """The keys in which a job differs from the one whose records its folder holds; none if it holds no records."""
    recorded = flatten(before.result.config or {})
    try:
        now = flatten(to_plain_dict(validate(Config, composed)))
    except ConfigError:  # the job is refused for it when it starts
        return []
    return [key for key, value in recorded.items() if key in now and key != "resume" and now[key] != value]


def _write_report(folder: Path) -> None:
    """Write the report of a sweep, and log it as text; an error is logged too."""
    from vitmnist.report.write import as_text, write_report  # imports matplotlib, which takes a second

    try:
        text = as_text(write_report([folder], folder))
        log.info("Results\n\n%s\n\nReport: %s", text, display_path(folder / "report.html"))
    except DataError:
        log.info("no job has begun, so there is no report")
    except Exception as error:  # `vitmnist report` can write it later
        log.error("the report could not be written: %s", error)
