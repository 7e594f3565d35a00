"""A sweep: every job is run, also after one that failed; each is reported at once; a stopped sweep goes on.

Hydra hands its callbacks neither what the jobs returned nor the end of a sweep that was stopped, so what is known of a
sweep is what its jobs left in their folders.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shlex
import subprocess
import sys
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from vitmnist.cli.folders import go_on_in
from vitmnist.config.labels import PACKAGE, leaves, plain, resolved
from vitmnist.config.schema import Config, Objective
from vitmnist.config.validation import typed
from vitmnist.errors import ConfigError, UserError
from vitmnist.report.runs import Run, read_run
from vitmnist.runtime.distributed import launched
from vitmnist.runtime.files import ClaimedError, claim
from vitmnist.runtime.signals import RunInterrupted, StopSignal

if TYPE_CHECKING:
    from vitmnist.tracking.result import Result

log = logging.getLogger(__name__)

BASIC = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
RECORD = "multirun.yaml"  # Hydra's record of a sweep


@dataclass(frozen=True)
class UnderWay:
    """A sweep of this process; no part of the callback, which launchers send to other processes."""

    config: DictConfig
    claim: IO[str]


_under_way: list[UnderWay] = []


class Sweep(Callback):
    """Begins and ends a sweep; `conf/config.yaml` names this class.

    Hydra makes a warning of an exception in a callback; `sys.exit` is what it lets pass.
    """

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Keep other processes out, and let the rounds of `repeats` vary slowest of all that is swept.

        So a drift of the machine meets every combination.
        """
        if launched():
            sys.exit(
                "error: -m: is for one process, which runs the jobs of a sweep one after another; each process of "
                "torchrun would run them all. Start the sweep with python, or each of its jobs with torchrun"
            )
        sweeper = config.hydra.sweeper
        typed = [one.partition("=")[2] for one in config.hydra.overrides.task if one.startswith("repeats=")]
        if config.repeats < 1 or (typed and typed[-1] != str(config.repeats)):
            sys.exit(f"error: repeats={typed[-1] if typed else config.repeats}: must be one whole number, at least 1")
        if config.repeats > 1:
            if sweeper._target_ != BASIC:
                sys.exit("error: repeats: is for sweeps over listed values, not for a search")
            rounds = ",".join(map(str, range(1, config.repeats + 1)))
            with read_write(config), open_dict(config):
                sweeper.params = {"repeat": rounds, **(sweeper.params or {})}
        folder = Path(config.hydra.sweep.dir)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _under_way[:] = [UnderWay(config, claim(folder))]
        except ConfigError as error:
            sys.exit(f"error: {error}")
        except OSError as error:
            sys.exit(f"error: {folder}: {error.strerror}; name another folder with hydra.sweep.dir=FOLDER")

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Show what came of it; the program ends with 1 if a job failed."""
        from vitmnist.report.runs import find_runs, read_run
        from vitmnist.report.write import as_text, write_report

        folder = Path(config.hydra.sweep.dir)
        try:
            page = os.path.join(os.path.relpath(folder), "report.html")
            log.info("what came of it\n\n%s\n\nthe report is %s", as_text(write_report([folder], folder)), page)
        except Exception as error:
            log.error("the report could not be written: %s", error)
        runs = [read_run(job) for job in find_runs([folder])]
        failed = [run.folder.name for run in runs if run.status not in ("completed", "interrupted")]
        if failed:
            sys.exit(f"error: {len(failed)} of {len(runs)} jobs failed: {', '.join(failed)}")


def run_job(composed: DictConfig, stop: StopSignal) -> float | None:
    """Run a job of a sweep, and bring the report up to date.

    Returns:
        What the job tells a search; None where it has nothing to tell, because it failed or was stopped.

    Raises:
        Stopped: the sweep was told to stop.
    """
    # Here, because this imports torch, which must wait until Hydra has answered --help.
    with stop.deferred():
        from vitmnist.run import choices_of, run
        from vitmnist.tracking.result import Result

    job = HydraConfig.get()
    folder, sweep_folder = Path(job.runtime.output_dir), Path(job.runtime.cwd) / job.sweep.dir
    overrides: list[str] = OmegaConf.to_container(job.overrides.task)  # type: ignore[assignment]
    before = read_run(folder)
    differing = differing_keys(before, composed)
    if before.status == "completed" and not differing:
        log.info("completed before")
        return objective(composed, before)
    try:
        stop.check()
        if differing:
            raise ConfigError(
                f"{folder}: holds the records of another job, with another {', '.join(differing)}; "
                "let hydra.sweep.subdir contain ${hydra.job.num}, or begin a new sweep"
            )
        make_ready(composed, folder)
        # A launcher's process has not begun with `main`.
        with nullcontext() if stop.listening else stop:
            run(composed, folder, overrides, stop)
        return objective(composed, read_run(folder))
    except (RunInterrupted, KeyboardInterrupt) as stopped:
        log.info("%s", str(stopped) or "interrupted")
        if isinstance(stopped, RunInterrupted) and not stopped.exit_code:
            return None  # the job's time is over, the sweep goes on
        raise
    except Exception as error:
        log.error("job %s failed: %s", job.job.num, error, exc_info=not isinstance(error, UserError))
        if isinstance(error, UserError):
            log_traceback(error)
        if not (folder / "result.json").exists() and not isinstance(error, ClaimedError):  # refused before it began
            refused = Result(overrides=overrides, choices=choices_of(composed), error=str(error))
            with suppress(OSError):
                record_refusal(refused, composed, folder)
        return None
    finally:
        with stop.deferred():
            refresh_report(sweep_folder)


def differing_keys(before: Run, composed: DictConfig) -> list[str]:
    """The keys in which a job is not the one whose records its folder holds; none where it holds no records."""
    known = leaves(before.result.get("config") or {})
    try:
        now = leaves(plain(typed(Config, composed)))
    except ConfigError:  # the job will be refused for it
        return []
    return [key for key, value in known.items() if key != "resume" and now.get(key) != value]


def make_ready(composed: DictConfig, folder: Path) -> None:
    """Let a job that did not complete before go on from its checkpoint, or begin anew where it has none."""
    if any((folder / "checkpoints").glob("*.pt")):
        composed.resume = str(folder)
    else:
        (folder / "result.json").unlink(missing_ok=True)


def how_to_go_on() -> str:
    """The end of a message about a sweep that was stopped: what to type; empty where there is no sweep."""
    if not _under_way:
        return ""
    config = _under_way[0].config
    if config.hydra.sweeper._target_ != BASIC:
        return "; a search with hydra.sweeper.storage=sqlite:///FILE goes on when it is typed again"
    typed = shlex.quote(f"sweep.resume={os.path.relpath(config.hydra.sweep.dir)}")
    return f"; go on with\n    python train.py {typed}"


def record_refusal(result: Result, composed: DictConfig, folder: Path) -> None:
    """Leave what a job leaves that never began: its result, and its row in HParams."""
    from vitmnist.tracking.tensorboard import TensorBoard

    result.config = resolved(composed)
    result.write(folder)
    with suppress(ConfigError), TensorBoard(folder, result):
        raise ConfigError(str(result.error))


def log_traceback(error: Exception) -> None:
    """Write a traceback into the job's log file, and not on the terminal, where the message says enough."""
    raised = (type(error), error, error.__traceback__)
    record = log.makeRecord(log.name, logging.ERROR, "", 0, "where it happened", (), raised)
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler):
            handler.handle(record)


def refresh_report(folder: Path) -> None:
    """Write the report of a sweep as far as it is.

    In a process of its own: what drawing takes must not stand in the memory of the next job.
    """
    paths = [str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    ended = subprocess.run(
        [sys.executable, "-m", "vitmnist.report", str(folder), "--quiet"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        start_new_session=True,  # Ctrl-C is for the sweep
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode:
        log.warning("the report could not be written: %s", ended.stderr.strip().rpartition("\n")[2])


def objective(composed: DictConfig, ended: Run) -> float:
    """What a search maximises or minimises, by `sweep.objective`.

    `eval_acc` is the accuracy after the last epoch, in percent; `seconds_to_target` the seconds of all epochs up to the
    first that reached `sweep.target_acc`, infinite if none did.
    """
    if composed.sweep.objective == Objective.eval_acc:
        return float(ended.epochs[-1]["eval_acc"])
    seconds = ended.seconds_to(composed.sweep.target_acc)
    return math.inf if seconds is None else seconds


def expand(arguments: list[str]) -> list[str]:
    """The arguments for Hydra; `sweep.resume=DIR` becomes what was typed for that sweep.

    Raises:
        ConfigError: there is no such sweep, or something else was typed too.
    """
    go_on_in(None)
    asked = [argument for argument in arguments if argument.startswith("sweep.resume=")]
    if not asked or asked[-1] == "sweep.resume=null":
        return arguments
    if asked[-1] == "sweep.resume=":
        raise ConfigError("sweep.resume=: is empty; name a folder such as outputs/sweeps/DATE/TIME-…")
    others = [argument for argument in arguments if argument not in (*asked, "-m", "--multirun")]
    if others or len(asked) > 1:
        rest = " ".join(others or asked[:-1])
        raise ConfigError(f"{asked[-1]}: goes on with that sweep as it was typed; leave out {rest}")
    folder = Path(asked[0].partition("=")[2].strip("'\"")).expanduser()
    if not (folder / RECORD).is_file():
        single = (folder / ".hydra").is_dir()
        hint = "resume= goes on with a single run" if single else "name a folder such as outputs/sweeps/DATE/TIME-…"
        raise ConfigError(f"{asked[0]}: holds no sweep over listed values; {hint}")
    overrides: Any = OmegaConf.to_container(OmegaConf.load(folder / RECORD).hydra.overrides)  # interpolations as typed
    typed: list[str] = [*overrides["task"], *overrides["hydra"]]
    again = [one for one in typed if one.partition("=")[0] not in ("hydra.sweep.dir", "hydra.mode")]
    go_on_in(folder)
    # Nothing else is typed: the jobs' own records of what was typed stay as they are.
    return ["-m", *again, f"hydra.sweep.dir={json.dumps(str(folder), ensure_ascii=False)}"]
