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
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from vitmnist.config import PACKAGE, Objective
from vitmnist.errors import ConfigError, UserError
from vitmnist.folders import is_claimed
from vitmnist.stop import Stop, Stopped

log = logging.getLogger(__name__)

BASIC = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
RECORD = "multirun.yaml"  # Hydra's record of a sweep


class Sweep(Callback):
    """Begins and ends a sweep; `conf/config.yaml` names this class."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Let the rounds of `repeats` vary slowest of all, so that a drift of the machine meets every combination."""
        sweeper = config.hydra.sweeper
        if sweeper._target_ != BASIC and (config.repeats > 1 or config.sweep.resume):
            key = "repeats" if config.repeats > 1 else "sweep.resume"
            sys.exit(
                f"error: {key}: is for sweeps over listed values; an Optuna study goes on by its own storage "
                "(hydra.sweeper.storage=sqlite:///study.db hydra.sweeper.study_name=NAME)"
            )
        if config.repeats > 1:
            rounds = ",".join(map(str, range(1, config.repeats + 1)))
            with read_write(config), open_dict(config):
                sweeper.params = {"repeat": rounds, **(sweeper.params or {})}

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Show what came of it; the program ends with 1 if a job failed."""
        from vitmnist.report.write import as_text, write_report

        folder = Path(config.hydra.sweep.dir)
        comparisons = write_report([folder], folder)
        page = os.path.join(os.path.relpath(folder), "report.html")
        log.info("what came of it\n\n%s\n\nthe report is %s", as_text(comparisons), page)
        runs = [run for comparison in comparisons for cell in comparison.cells for run in cell.runs]
        failed = [run.folder.name for run in runs if run.status not in ("completed", "interrupted")]
        if failed:
            sys.exit(f"error: {len(failed)} of {len(runs)} jobs failed: {', '.join(failed)}")


def run_job(composed: DictConfig, stop: Stop) -> float | None:
    """Run a job of a sweep, and bring the report up to date.

    Returns:
        What the job tells a search; None where it has nothing to tell, because it failed or was stopped.

    Raises:
        Stopped: the sweep was told to stop.
    """
    # Here, because this imports torch, which must wait until Hydra has answered --help.
    with stop.deferred():
        from vitmnist.records.result import Result
        from vitmnist.run import choices_of, run

    job = HydraConfig.get()
    folder, sweep = Path(job.runtime.output_dir), Path(job.sweep.dir)
    overrides: list[str] = OmegaConf.to_container(job.overrides.task)  # type: ignore[assignment]
    before = finished_before(composed, folder) if composed.sweep.resume else None
    if before is not None:
        log.info("completed before")
        return objective(composed, before)
    try:
        stop.check()
        return objective(composed, [asdict(epoch) for epoch in run(composed, folder, overrides, stop).epochs])
    except (Stopped, KeyboardInterrupt) as stopped:
        log.info("%s", str(stopped) or "interrupted")
        if isinstance(stopped, Stopped) and not stopped.exit_code:
            return None  # the job's time is over, the sweep goes on
        log.info("go on with\n    python train.py %s", shlex.quote(f"sweep.resume={os.path.relpath(sweep)}"))
        raise
    except Exception as error:
        if not composed.resume and not (folder / "result.json").exists():  # it was refused before it began
            Result(overrides=overrides, choices=choices_of(composed), error=str(error)).write(folder)
        log.error("job %s failed: %s", job.job.num, error, exc_info=not isinstance(error, UserError))
        if isinstance(error, UserError):
            log_traceback(error)
        return None
    finally:
        with stop.deferred():
            refresh_report(sweep)


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


def objective(composed: DictConfig, epochs: Sequence[dict[str, Any]]) -> float:
    """What a search maximises or minimises, by `sweep.objective`.

    `val_acc` is the accuracy after the last epoch, in percent; `seconds_to_target` the seconds of all epochs up to the
    first that reached `sweep.target_acc`, infinite if none did.
    """
    if composed.sweep.objective == Objective.val_acc:
        return float(epochs[-1]["val_acc"])
    reached = [epoch["val_acc"] >= composed.sweep.target_acc for epoch in epochs]
    if not any(reached):
        return math.inf
    return float(sum(epoch["epoch_s"] for epoch in epochs[: reached.index(True) + 1]))


def finished_before(composed: DictConfig, folder: Path) -> list[dict[str, Any]] | None:
    """The epochs of a job that completed when the sweep ran before.

    Otherwise None, and the job is made ready: to go on from its checkpoint, or to begin anew where it has none.
    """
    file = folder / "result.json"
    try:
        result = json.loads(file.read_text())
        if result["status"] == "completed":
            return list(result["epochs"])
    except (OSError, ValueError, KeyError):
        pass
    if any((folder / "checkpoints").glob("*.pt")):
        composed.resume = str(folder)
    else:
        file.unlink(missing_ok=True)
    return None


def expand(arguments: list[str]) -> list[str]:
    """The arguments for Hydra; `sweep.resume=DIR` becomes what was typed for that sweep.

    Raises:
        ConfigError: there is no such sweep, or something else was typed too.
    """
    asked = [argument for argument in arguments if argument.startswith("sweep.resume=")]
    if not asked or asked[-1] in ("sweep.resume=", "sweep.resume=null"):
        return arguments
    others = [argument for argument in arguments if argument not in (*asked, "-m", "--multirun")]
    if others or len(asked) > 1:
        rest = " ".join(others or asked[:-1])
        raise ConfigError(f"{asked[-1]}: goes on with that sweep as it was typed; leave out {rest}")
    folder = Path(asked[0].partition("=")[2].strip("'\"")).expanduser()
    if not (folder / RECORD).is_file():
        single = (folder / ".hydra").is_dir()
        hint = "resume= goes on with a single run" if single else "name a folder such as outputs/sweeps/DATE/TIME"
        raise ConfigError(f"{asked[0]}: holds no sweep; {hint}")
    running = [job.name for job in folder.iterdir() if (job / ".lock").exists() and is_claimed(job)]
    if running:
        raise ConfigError(f"{asked[0]}: job {running[0]} is still running; wait for it, or stop it")
    overrides: Any = OmegaConf.to_container(OmegaConf.load(folder / RECORD).hydra.overrides)  # interpolations as typed
    typed: list[str] = [*overrides["task"], *overrides["hydra"]]
    place = json.dumps(str(folder), ensure_ascii=False)
    again = [one for one in typed if one.partition("=")[0] not in ("sweep.resume", "hydra.sweep.dir", "hydra.mode")]
    return ["-m", *again, f"hydra.sweep.dir={place}", f"sweep.resume={place}"]
