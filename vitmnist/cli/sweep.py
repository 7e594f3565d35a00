"""Runs a sweep with any sweeper and launcher of Hydra. A failed job does not end it; a completed job is skipped.

What sweepers return differs, so the state of a sweep is read from the folders of its jobs.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import shlex
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from vitmnist.cli.arguments import Arguments, quote
from vitmnist.cli.command import format_command
from vitmnist.cli.messages import classify_cli_error
from vitmnist.cli.process import add_resume_hint
from vitmnist.cli.start import ConfiguredRun, start_run
from vitmnist.config import parse_key, without_keys
from vitmnist.config.schema import Config
from vitmnist.config.validation import validate
from vitmnist.errors import ConfigError, RunInterrupted, TimeLimitReached, TrainingError
from vitmnist.metrics import MetricCollection
from vitmnist.metrics.epoch_table import find_metric
from vitmnist.runtime import signals
from vitmnist.runtime.files import display_path
from vitmnist.runtime.run_folder import InUseError, lock_folder
from vitmnist.runtime.world import is_distributed
from vitmnist.tracking.result import Result
from vitmnist.tracking.resume import is_resumable
from vitmnist.tracking.runs import read_run

log = logging.getLogger(__name__)

# The override that makes a sweep run in rounds.
ROUNDS_SWEEPER = "hydra.sweeper._target_=hydra_plugins.vitmnist_sweepers.RoundsSweeper"


def run_sweep(arguments: Arguments, values: DictConfig, hydra_values: DictConfig, stop: signals.StopSignal) -> None:
    """Run the jobs of a sweep, and write a report at the end or when the sweep is stopped.

    Args:
        values: the composed configuration, with the defaults of the keys that the sweep varies.
        hydra_values: the section `hydra`.

    Raises:
        TrainingError: some jobs failed.
        RunInterrupted: the sweep was asked to stop, or some jobs are unfinished.
    """
    folder = Path(hydra_values.sweep.dir)
    overrides = _prepare_sweep(arguments, values, hydra_values, folder)
    job = Job(stop)
    composer = GlobalHydra.instance().hydra
    assert composer
    # With joblib, jobs run in other processes, which are killed if this process raises an exception while it waits.
    is_parallel = str(hydra_values.launcher._target_).endswith("JoblibLauncher")
    handled = signals.list_handled_signals() if is_parallel else []
    sweep_arguments = without_keys(arguments.argv, ["resume", "hydra.sweep.dir"])
    resume_arguments = [*sweep_arguments, f"hydra.sweep.dir={quote(display_path(folder))}", "resume=auto"]
    with (
        lock_folder(folder, "hydra.sweep.dir", refuse_existing=arguments.resume is None),
        add_resume_hint(folder, f"{format_command()} {shlex.join(resume_arguments)}"),
    ):
        try:
            with signals.handle_signals(signals.raise_interruption, *handled):
                composer.multirun("config", job, overrides)
        except RunInterrupted:
            _write_report(folder)
            raise
        _write_report(folder)
        _check_jobs(folder, job)


def _prepare_sweep(arguments: Arguments, values: DictConfig, hydra_values: DictConfig, folder: Path) -> list[str]:
    """Check a sweep, and return the overrides for Hydra's sweeper."""
    if is_distributed():
        raise ConfigError(
            "-m: torchrun cannot run a sweep, because each of its processes would run all jobs; start the sweep with "
            "python, or each job with torchrun"
        )
    # The names of the jobs' folders contain only the keys that the sweep varies.
    parsed = OverridesParser.create().parse_overrides(arguments.overrides)
    is_varied = {parse_key(override.get_key_element()): override.is_sweep_override() for override in parsed}
    if not (is_varied.get("monitor") or is_varied.get("metrics")):
        find_metric(values.monitor, "monitor", MetricCollection(values.metrics).infos)  # Raise before the first job.
    constant_keys = [quote(key) for key in is_varied if not is_varied[key]]
    exclude_keys = f"hydra.job.config.override_dirname.exclude_keys=[{','.join(constant_keys)}]"
    overrides = [*arguments.overrides, exclude_keys, f"hydra.sweep.dir={quote(str(folder))}"]
    if values.repeats > 1 and not _is_search(hydra_values):
        overrides = [f"repeat={','.join(map(str, range(1, values.repeats + 1)))}", *overrides, ROUNDS_SWEEPER]
    return overrides


def _check_jobs(folder: Path, job: Job) -> None:
    """Raise an error if a job of a sweep failed or is unfinished."""
    # A refused job has a record but no lock, and a job that was killed before its first record has only a lock.
    files = [*folder.glob("*/**/.lock"), *folder.glob("*/**/result.json")]
    runs = [read_run(job_folder) for job_folder in sorted({file.parent for file in files})]
    failed = {run.folder.name for run in runs if run.result.status not in ("completed", "interrupted", "running")}
    if failed := failed | job.failed:
        raise TrainingError(f"{len(failed)} of {len(runs)} jobs failed: {', '.join(sorted(failed))}")
    if unfinished := [run.folder.name for run in runs if run.result.status != "completed"]:
        raise RunInterrupted(f"{len(unfinished)} of {len(runs)} jobs are unfinished: {', '.join(unfinished)}")


def _is_search(hydra_config: Any) -> bool:
    """Whether the sweeper is a search, which proposes jobs from the results of earlier jobs."""
    return bool(hydra_config.runtime.choices["hydra/sweeper"] != "basic")


class Job:
    """Trains the jobs of a sweep. Hydra calls it for each job, here or as a copy in a process of a launcher."""

    def __init__(self, stop: signals.StopSignal) -> None:
        self.stop = stop
        # The names of the folders of jobs that failed in this process, because some of them leave no record.
        self.failed: set[str] = set()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        if multiprocessing.parent_process():
            # A loader cannot start workers with the start method of joblib's processes.
            multiprocessing.set_start_method(None, force=True)

    def __call__(self, composed: DictConfig) -> float | None:
        """Train the job unless it is completed; return the monitored metric, or None if the job is not completed.

        Raises:
            RunInterrupted: a signal has stopped the job, and with it the sweep.
        """
        hydra_config = HydraConfig.get()
        folder = Path(hydra_config.runtime.output_dir)
        overrides = list(hydra_config.overrides.task)
        # Free the compiled step of the previous job: it is part of a reference cycle.
        gc.collect()
        try:
            # The signal may have arrived too late to stop the previous job.
            if self.stop.reason:
                raise signals.create_interruption(self.stop.reason)
            config = validate(Config, composed)
            # A search does not repeat a failed trial, which counts as a trial.
            if _is_search(hydra_config) and read_run(folder).result.status == "failed":
                return None
            with lock_folder(folder, "hydra.sweep.dir"):
                resume = str(folder) if is_resumable(folder) else None
                start_run(ConfiguredRun(replace(config, resume=resume), folder, overrides), self.stop)
            return read_run(folder).value_of(find_metric(config.monitor, "monitor").name)
        except RunInterrupted as error:
            if not isinstance(error, TimeLimitReached):
                raise
            log.info("job %s: %s", hydra_config.job.num, error)
        except Exception as error:
            self._record_failure(error, composed, folder, overrides)
        return None

    def _record_failure(self, error: Exception, composed: DictConfig, folder: Path, overrides: list[str]) -> None:
        """Record why a job failed, but do not overwrite the record of an earlier start or of another process."""
        failure = classify_cli_error(error)
        job = HydraConfig.get().job
        log.error("job %s failed: %s", job.num, failure.message, exc_info=not failure.is_user_error)
        if isinstance(error, InUseError):
            return
        self.failed.add(folder.name)
        if not (folder / "result.json").exists():
            config: Any = OmegaConf.to_container(composed, enum_to_str=True)
            with suppress(ConfigError):
                config["metrics"] = MetricCollection(config["metrics"]).configs  # As `Trainer` records it.
            result = Result(
                folder=folder, overrides=overrides, config=config, error=failure.message, exit_code=failure.exit_code
            )
            with suppress(OSError):
                result.write()


def _write_report(folder: Path) -> None:
    """Write the report of a sweep and log its text; log an error instead of raising it."""
    from vitmnist.report.write import write_report  # Import late: matplotlib takes a second.

    try:
        text = write_report([folder], folder)
        log.info("Results\n\n%s\n\nReport: %s", text, display_path(folder / "report.html"))
    except Exception as error:
        # Without its report, the sweep has still trained its jobs; `vitmnist report` can write the report later.
        log.error("cannot write the report: %s", error)
