"""The jobs of a sweep: a failing one does not end it, a completed one is skipped, and the report follows each.

Hydra tells a callback neither what the jobs returned nor that a sweep was interrupted, so the state of a sweep is what
its jobs left in their folders.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from vitmnist.cli.messages import describe
from vitmnist.config.schema import Config
from vitmnist.config.validation import validate
from vitmnist.config.values import flatten, to_plain_dict
from vitmnist.errors import ConfigError, TrainingError
from vitmnist.runtime.files import InUseError, display_path, has_checkpoint
from vitmnist.runtime.signals import UNFINISHED, RunInterrupted, TimeLimitReached
from vitmnist.tracking.result import Result, choices_of
from vitmnist.tracking.runs import Run, find_runs, read_run

log = logging.getLogger(__name__)


# Jobs of this sweep that failed without a record, because their folder holds a completed job.
unrecorded: list[str] = []


def is_search(config: DictConfig) -> bool:
    """Whether a sweeper such as Optuna's chooses the values, in place of Hydra's own, which runs listed ones."""
    return bool(config.hydra.runtime.choices["hydra/sweeper"] != "basic")


def is_parallel(hydra: Any) -> bool:
    """Whether joblib runs the jobs, in processes of its own; the argument is Hydra's part of the configuration."""
    return str(hydra.launcher._target_).endswith("JoblibLauncher")


def apply_repeats(config: DictConfig) -> None:
    """Sweep over the rounds of `repeats`, as the slowest of all keys: a drift of the machine affects all combinations.

    Raises:
        ConfigError: `repeats` is not one positive number, or this is a search.
    """
    given = [one.partition("=")[2] for one in config.hydra.overrides.task if one.startswith("repeats=")]
    if config.repeats < 1 or (given and given[-1] != str(config.repeats)):
        raise ConfigError(f"repeats={given[-1] if given else config.repeats}: must be one whole number, at least 1")
    if config.repeats > 1:
        if is_search(config):
            raise ConfigError("repeats: is for sweeps over listed values, not for a search")
        rounds = ",".join(map(str, range(1, config.repeats + 1)))
        with read_write(config), open_dict(config):
            config.hydra.sweeper._target_ = "hydra_plugins.vitmnist_rounds.RoundsSweeper"
            config.hydra.sweeper.params = {"repeat": rounds, **(config.hydra.sweeper.params or {})}


def is_completed_job(composed: DictConfig, folder: Path) -> bool:
    """Whether a resumed sweep has completed this job before."""
    before = read_run(folder)
    is_completed = before.status == "completed" and not _differing_keys(before, composed)
    if is_completed:
        log.info("completed before")
    return is_completed


def job_config(composed: DictConfig, folder: Path) -> Config:
    """The configuration of a job, which resumes if it has a checkpoint.

    Raises:
        ConfigError: it cannot be used, or the folder holds the records of another job.
    """
    if differing := _differing_keys(read_run(folder), composed):
        raise ConfigError(
            f"{display_path(folder)}: holds the records of another job, with another {', '.join(differing)}; "
            "let hydra.sweep.subdir contain ${hydra.job.num}, or begin a new sweep"
        )
    if has_checkpoint(folder):
        return replace(validate(Config, composed), resume=str(folder))
    (folder / "result.json").unlink(missing_ok=True)
    return replace(validate(Config, composed), resume=None)


@contextmanager
def recorded_job(composed: DictConfig, folder: Path, overrides: list[str]) -> Iterator[None]:
    """Record why the job in the block failed, so that the sweep continues, and refresh the report.

    Raises:
        RunInterrupted: the sweep was asked to stop, and not only this job by its max_minutes.
    """
    job = HydraConfig.get()
    number, sweep_folder = job.job.num, Path(job.runtime.cwd, job.sweep.dir)
    gc.collect()  # a compiled step of the job before is a reference cycle that holds memory
    try:
        yield
    except RunInterrupted as error:
        if not isinstance(error, TimeLimitReached) and not is_parallel(job):  # joblib would kill the other jobs at once
            raise
        log.info("job %s: %s", number, error)
    except Exception as error:
        failure = describe(error)
        log.error("job %s failed: %s", number, failure.message, exc_info=not failure.is_user_error)
        # The records of an earlier start stay, and so do those of the process that uses the folder.
        if isinstance(error, InUseError):
            return
        if read_run(folder).status == "completed":
            unrecorded.append(folder.name)
        elif not (folder / "result.json").exists():
            config: Any = OmegaConf.to_container(composed, enum_to_str=True)
            refused = Result(overrides=overrides, choices=choices_of(config), error=failure.message, config=config)
            with suppress(OSError):
                refused.write(folder)
    finally:
        _write_report(sweep_folder, with_chart=False)


def objective(folder: Path) -> float | None:
    """What a search optimises, the accuracy after the last epoch in percent; None if the job did not complete."""
    job = read_run(folder)
    return job.value("eval_acc") if job.status == "completed" else None


def report_sweep(folder: Path, resume_hint: str) -> None:
    """Write and log the report of a sweep. Exits with `UNFINISHED` if a job has reached its max_minutes, or is in use.

    Raises:
        TrainingError: names the jobs that failed.
    """
    if text := _write_report(folder, with_chart=True):
        log.info("Results\n\n%s\n\nReport: %s", text, display_path(folder / "report.html"))
    begun = {path.parent.resolve(): path.parent for path in sorted(folder.glob("*/**/.lock"))}
    jobs = [read_run(job) for job in (begun | {job.resolve(): job for job in find_runs([folder])}).values()]
    failed = [job.folder.name for job in jobs if job.status not in ("completed", "interrupted", "running")]
    failed += unrecorded
    if failed:
        raise TrainingError(f"{len(failed)} of {len(jobs)} jobs failed: {', '.join(failed)}")
    if unfinished := [job.folder.name for job in jobs if job.status in ("interrupted", "running")]:
        log.info("%d of %d jobs are unfinished: %s%s", len(unfinished), len(jobs), ", ".join(unfinished), resume_hint)
        sys.exit(UNFINISHED)


def _differing_keys(before: Run, composed: DictConfig) -> list[str]:
    """The keys in which a job differs from the one whose records its folder holds; none if it holds no records."""
    recorded = flatten(before.result.get("config") or {})
    try:
        now = flatten(to_plain_dict(validate(Config, composed)))
    except ConfigError:  # `run` will refuse the job for it
        return []
    return [key for key, value in recorded.items() if key in now and key != "resume" and now[key] != value]


def _write_report(folder: Path, with_chart: bool) -> str | None:
    """Write the report of a sweep so far; returns it as text, or None if it could not be written.

    The chart is drawn once, at the end: importing matplotlib can take longer than a short job.
    """
    from vitmnist.report.write import as_text, write_report

    try:
        return as_text(write_report([folder], folder, with_chart=with_chart))
    except Exception as error:  # `vitmnist report` can write it later
        log.error("the report could not be written: %s", error)
        return None
