"""The output folder of this command, locked before anything is written into it; its records are never overwritten.

Hydra creates the folder before it calls the task, so this runs in a Hydra callback.
"""

from __future__ import annotations

import logging
import shlex
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NoReturn

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobStatus
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from vitmnist.cli.arguments import Resume
from vitmnist.cli.command import program
from vitmnist.cli.overrides import check_name, key_of
from vitmnist.cli.resume import is_resumable, recorded_config, recorded_overrides
from vitmnist.cli.search import continue_search
from vitmnist.cli.sweep import apply_repeats, is_parallel, is_search, report_sweep, unrecorded
from vitmnist.config.schema import Config
from vitmnist.config.validation import validate
from vitmnist.config.values import to_plain_dict
from vitmnist.errors import ConfigError
from vitmnist.runtime.files import display_path, has_checkpoint, locked
from vitmnist.runtime.signals import StopSignal, interruption
from vitmnist.runtime.world import launched
from vitmnist.tracking.runs import Run, read_run

log = logging.getLogger(__name__)

RECORDS = ("result.json", "checkpoints/*.pt")


class OutputFolder:
    """The folder of a run or sweep, created and locked until `release`.

    Args:
        key: by which the folder is named on the command line.
        refused: files of an earlier run or sweep that must not be there.

    Raises:
        ConfigError: it cannot be created, is in use, or holds records.
    """

    def __init__(self, path: Path, key: str, refused: tuple[str, ...] = ()) -> None:
        self.path, self._lock = path.absolute(), ExitStack()
        check_name(self.path, f"name another folder with {key}=FOLDER")
        try:
            self._lock.enter_context(locked(self.path))
        except OSError as error:
            hint = "" if path.is_dir() else f"; name another folder with {key}=FOLDER"
            raise ConfigError(f"{display_path(path)}: {error.strerror}{hint}") from error
        if any(any(self.path.glob(pattern)) for pattern in refused):
            raise ConfigError(
                f"{key}={display_path(path)}: holds records already, which would be overwritten; name another folder, "
                "or resume with resume=auto"
            )

    def release(self) -> None:
        """Let other processes use the folder."""
        self._lock.close()


@dataclass
class Command:
    """This process's command: its arguments, what it resumes, the configuration of its run, and its output folder."""

    typed: list[str] = field(default_factory=list)
    resume: Resume | None = None
    config: Config | None = None
    overrides: list[str] = field(default_factory=list)
    output: OutputFolder | None = None
    kind: Literal["run", "sweep", "search"] = "run"
    stage: Literal["starting", "training", "completed"] = "starting"
    stop: StopSignal = field(default_factory=StopSignal)

    def resume_hint(self, ranks: int) -> str:
        """The end of a message about an interruption: where the results are, and the command that resumes."""
        if not self.output:
            return ""
        shown = display_path(self.output.path)
        if self.kind == "search":
            return "; a search with hydra.sweeper.storage=sqlite:///FILE continues when it is started again"
        if self.kind == "sweep":  # whose command is typed again
            kept = [one for one in self.typed if key_of(one) not in ("resume", "hydra.sweep.dir")]
            same = shlex.join([*kept, f"hydra.sweep.dir={shown}", "resume=auto"])
            return f"; results: {shown}, resume with\n    {program()} {same}"
        if not has_checkpoint(self.output.path):
            return f"; results: {shown}"
        return f"; results: {shown}, resume with\n    {program(ranks)} {shlex.quote(f'resume={shown}')}"


command = Command()  # not in the callback, which launchers pickle


class TaskError(BaseException):
    """Carries an exception past Hydra, which would print a message of its own, or turn it into a warning."""


class Outputs(Callback):
    """Begins and ends a run or sweep; `conf/config.yaml` names this class."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Check the configuration of a single run, and lock its folder."""
        with _past_hydra():
            command.overrides = OmegaConf.to_container(config.hydra.overrides.task)  # type: ignore[assignment]
            if config.repeats > 1:
                raise ConfigError(f"repeats={config.repeats}: repeats the jobs of a sweep; type -m as well")
            command.config = start_run(config, command.resume)

    def on_run_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Show where the results are."""
        if kwargs["job_return"].status == JobStatus.COMPLETED:
            shown = display_path(config.hydra.run.dir)
            log.info("Results: %s\nView them with\n    tensorboard --logdir %s", shown, shlex.quote(shown))

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Check the command line of a sweep, and lock its folder."""
        with _past_hydra():
            command.kind = "search" if is_search(config) else "sweep"
            if launched():
                raise ConfigError(
                    "-m: is for one process, which runs the jobs of a sweep one after another; each process of "
                    "torchrun would run them all. Start the sweep with python, or each of its jobs with torchrun"
                )
            if command.resume and command.resume.config:
                raise ConfigError(
                    "resume: resumes one run, and this command is a sweep (-m, or an experiment that is one)"
                )
            if command.resume and command.kind == "search":
                raise ConfigError("resume=auto: a search continues by hydra.sweeper.storage=sqlite:///FILE instead")
            apply_repeats(config)
            continue_search(config)
            unrecorded.clear()
            refused = () if command.resume else tuple(f"**/{pattern}" for pattern in RECORDS)
            command.output = OutputFolder(Path(config.hydra.sweep.dir), "hydra.sweep.dir", refused)
            if is_parallel(config.hydra):
                command.stop.lead()

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Show the report; the program ends with 1 if a job failed."""
        with _past_hydra():
            if command.stop.request:
                raise interruption(command.stop.request)
            report_sweep(Path(config.hydra.sweep.dir), command.resume_hint(1))


@contextmanager
def _past_hydra() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise TaskError from error


def start_run(composed: DictConfig, resume: Resume | None) -> Config:
    """The configuration of a new or resumed run, whose folder is locked. Exits if the run is completed.

    Raises:
        ConfigError: the configuration, the folder or its records cannot be used.
    """
    HydraConfig.instance().set_config(composed)  # for ${hydra:runtime.cwd}; Hydra does so only later
    folder = Path(composed.hydra.run.dir)
    if resume is None:
        config = new_config(composed)
        command.output = OutputFolder(folder, "hydra.run.dir", RECORDS)
        return config
    run, is_auto, config = read_run(folder), resume.config is None, resume.config or new_config(composed)
    if is_auto and run.status == "completed":
        config = recorded_config(folder, resume.typed)
    config = replace(config, resume=str(folder))
    if run.status == "completed" and len(run.epochs) == config.epochs:
        _end_completed(run, config)
    if run.status == "completed" and not has_checkpoint(folder):
        raise ConfigError(
            f"{display_path(folder)}: is completed, and has no checkpoint to continue from; start a new run in another "
            "folder, with hydra.run.dir=FOLDER"
        )
    command.output = OutputFolder(folder, "hydra.run.dir")
    if not is_auto:
        keys = [key_of(one) for one in resume.typed]
        command.overrides = [one for one in recorded_overrides(folder) if key_of(one) not in keys] + resume.typed
        return config
    if is_resumable(folder):  # asked under the lock: another process may have trained here meanwhile
        print(f"resume=auto: resuming {display_path(folder)}")
        return replace(recorded_config(folder, resume.typed), resume=str(folder))
    print(f"resume=auto: nothing to resume in {display_path(folder)}; a new run begins")
    return replace(config, resume=None)


def new_config(composed: DictConfig) -> Config:
    """The composed configuration of a run that begins."""
    values = OmegaConf.masked_copy(composed, [str(key) for key in composed if key != "hydra"])
    return replace(validate(Config, values), resume=None)


def _end_completed(run: Run, config: Config) -> NoReturn:
    from vitmnist.checkpoint.manager import check_resumable  # imports torch

    check_resumable(to_plain_dict(recorded_config(run.folder, [])), to_plain_dict(config))
    shown, accuracy = display_path(run.folder), run.value("eval_acc")
    result = "" if accuracy is None else f", accuracy {accuracy:.2f}%"
    further = f"; train further with\n    {program()} {shlex.quote(f'resume={shown}')} epochs=N"
    print(f"{shown}: completed, epoch {config.epochs}/{config.epochs}{result}{further * has_checkpoint(run.folder)}")
    sys.exit(0)
