"""The output folder of this command: records in it are never overwritten, and an unused one is removed.

Hydra creates the folder before it calls the task, so this runs in a Hydra callback.
"""

from __future__ import annotations

import logging
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from hydra.core.utils import JobStatus
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from vitmnist.cli.sweep import apply_repeats, is_search, not_recorded, report_sweep
from vitmnist.errors import ConfigError, UserError
from vitmnist.runtime.files import claim, display_path, has_checkpoint
from vitmnist.runtime.program import program
from vitmnist.runtime.world import launched

log = logging.getLogger(__name__)

RECORDS = ("result.json", "checkpoints/*.pt")


class OutputFolder:
    """The folder of a run or sweep, created here.

    Raises:
        ConfigError: it cannot be created, is in use, or holds records that would be overwritten.
    """

    def __init__(self, config: DictConfig, is_sweep: bool, resumes: bool) -> None:
        self.config, self.is_sweep = config, is_sweep
        kind = "sweep" if is_sweep else "run"
        path = self.path = Path(config.hydra[kind].dir).absolute()
        if not resumes and self.has_records():
            resume = "sweep.resume" if is_sweep else "resume"
            raise ConfigError(
                f"hydra.{kind}.dir={display_path(path)}: holds records already, which would be overwritten; "
                f"name another folder, or resume with {resume}=FOLDER"
            )
        self._created = [folder for folder in (path, *path.parents) if not folder.exists()]
        self._lock: IO[str] | None = None  # a run takes its own, after the command line has been checked
        try:
            path.mkdir(parents=True, exist_ok=True)
            if is_sweep:
                self._lock = claim(path)
        except OSError as error:
            self.remove_unused()
            advice = f"name another folder with hydra.{kind}.dir=FOLDER"
            raise ConfigError(f"{display_path(path)}: {error.strerror}; {advice}") from error

    def has_records(self) -> bool:
        """Whether a run has left a result or a checkpoint here, or a job of a sweep has."""
        prefix = "**/" if self.is_sweep else ""
        return any(any(self.path.glob(f"{prefix}{pattern}")) for pattern in RECORDS)

    def remove_unused(self) -> None:
        """Remove the folder and its empty parents if this command created them and left no records."""
        if self._created and not self.has_records():
            shutil.rmtree(self.path, ignore_errors=True)
            for parent in self._created[1:]:
                with suppress(OSError):  # not empty: another run uses it
                    parent.rmdir()

    def end_failed(self, has_begun: bool) -> None:
        """After a failure, remove the folder or name it; one that was typed to be resumed is known.

        Args:
            has_begun: whether a run failed that had begun, so that its log is worth keeping.
        """
        if not has_begun:
            self.remove_unused()
            logs = [path.name.startswith("rank-") for path in self.path.glob("*")]
            if launched() and logs and all(logs):  # rank 0 has removed the folder, and a log created it again
                shutil.rmtree(self.path, ignore_errors=True)
        if not self.is_sweep and not self.config.resume and self.path.exists():
            log.info("failed; results: %s", display_path(self.path))

    def resume_hint(self, ranks: int) -> str:
        """The end of a message about an interrupted run or sweep: where its results are, and how to resume it."""
        shown = display_path(self.path)
        if self.is_sweep and is_search(self.config):
            return "; a search with hydra.sweeper.storage=sqlite:///FILE continues when it is started again"
        if not self.is_sweep and not has_checkpoint(self.path):
            return f"; results: {shown}"
        override = shlex.quote(f"{'sweep.resume' if self.is_sweep else 'resume'}={shown}")
        return f"; results: {shown}, resume with\n    {program(ranks)} {override}"


current: OutputFolder | None = None  # of this process's command; not in the callback, which launchers pickle


class Outputs(Callback):
    """Begins and ends a run or sweep; `conf/config.yaml` names this class.

    Hydra turns an exception of a callback into a warning and continues; only `sys.exit` ends the program.

    Args:
        resume_sweep: whether the sweep's folder may hold records; set by `sweep.resume=`.
    """

    def __init__(self, resume_sweep: bool = False) -> None:
        self.resume_sweep = resume_sweep

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Check the command line of a single run, and create its folder."""
        with _exit_on_refusal():
            if config.repeats > 1:
                raise ConfigError(f"repeats={config.repeats}: repeats the jobs of a sweep; type -m as well")
            _create(config, is_sweep=False, resumes=bool(config.resume))

    def on_run_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Show where the results are."""
        if kwargs["job_return"].status == JobStatus.COMPLETED:
            shown = display_path(config.hydra.run.dir)
            log.info("Results: %s\nView them with\n    tensorboard --logdir %s", shown, shlex.quote(shown))

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Check the command line of a sweep, create its folder, and keep other processes out of it."""
        with _exit_on_refusal():
            if launched():
                raise ConfigError(
                    "-m: is for one process, which runs the jobs of a sweep one after another; each process of "
                    "torchrun would run them all. Start the sweep with python, or each of its jobs with torchrun"
                )
            apply_repeats(config)
            not_recorded.clear()
            _create(config, is_sweep=True, resumes=self.resume_sweep)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Show the report; the program ends with 1 if a job failed."""
        with _exit_on_refusal():
            report_sweep(Path(config.hydra.sweep.dir))


@contextmanager
def _exit_on_refusal() -> Iterator[None]:
    try:
        yield
    except UserError as error:
        sys.exit(f"error: {error}")


def _create(config: DictConfig, is_sweep: bool, resumes: bool) -> None:
    global current  # noqa: PLW0603
    current = OutputFolder(config, is_sweep, resumes)
