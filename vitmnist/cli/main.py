"""The command line: `python train.py`, `python -m vitmnist` and `vitmnist` are the same program."""

from __future__ import annotations

import logging
import os
import shlex
import sys
from pathlib import Path
from typing import NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from vitmnist.cli import sweep
from vitmnist.cli.folders import take_back, take_back_unbegun_sweep
from vitmnist.cli.messages import explain
from vitmnist.cli.sweep import run_job
from vitmnist.cli.torchrun import Launch
from vitmnist.config.labels import CONF
from vitmnist.errors import ConfigError, DataError, PeerError
from vitmnist.runtime.signals import RunInterrupted, StopSignal

log = logging.getLogger(__name__)

SHOW_TRACEBACK = os.environ.get("HYDRA_FULL_ERROR") == "1"

STOP = StopSignal()
LAUNCH = Launch()


@hydra.main(config_path=str(CONF), config_name="config", version_base="1.3")
def train(composed: DictConfig) -> float | None:
    """One run; Hydra calls this once for a run and once for each job of a sweep, whose objective it returns."""
    job = HydraConfig.get()
    STOP.after_minutes(None)  # those of the job before
    if job.mode == RunMode.MULTIRUN:
        return run_job(composed, STOP)
    # This imports torch: not before Hydra has answered --help. An import cannot be stopped in the middle.
    with STOP.deferred():
        from vitmnist.run import run

    folder = Path(job.runtime.output_dir)
    shown = os.path.relpath(folder)
    overrides: list[str] = OmegaConf.to_container(job.overrides.task)  # type: ignore[assignment]
    try:
        STOP.check()
        if composed.repeats > 1:
            raise ConfigError(f"repeats={composed.repeats}: repeats the jobs of a sweep; type -m as well")
        LAUNCH.begin(folder)
        run(composed, folder, overrides, STOP, LAUNCH.world)
    except (RunInterrupted, KeyboardInterrupt) as stopped:
        saved = any((folder / "checkpoints").glob("*.pt"))
        log.info("%s; records in %s", stopped if str(stopped) else "interrupted", shown)
        if isinstance(stopped, RunInterrupted):
            stopped.told = True
        if saved:
            several = (
                f"torchrun --nproc-per-node={LAUNCH.world.local_world_size}" if LAUNCH.world.size > 1 else "python"
            )
            log.info("go on with\n    %s train.py %s", several, shlex.quote(f"resume={shown}"))
        raise
    except Exception as error:
        if isinstance(error, ConfigError | DataError | PeerError):
            take_back()
        else:
            log.info("failed; records in %s", shown)
        fail(error, composed)
    log.info("records in %s; look at them with\n    tensorboard --logdir %s", shown, shlex.quote(shown))
    return None


def fail(error: BaseException, composed: DictConfig | None = None) -> NoReturn:
    """End with one message and exit code 1; with a traceback where it was asked for, or the program is at fault."""
    message = explain(error, CONF, composed)
    if SHOW_TRACEBACK or message is None:
        if LAUNCH.world.report_failure(str(error) or type(error).__name__):
            raise error
        sys.exit(1)
    sys.exit(f"error: {message}")


def main() -> None:
    """Run the program; of several processes, the first that fails says why."""
    try:
        start()
    except SystemExit as ended:
        if not ended.code:
            LAUNCH.end()
        elif not LAUNCH.world.report_failure(str(ended.code).removeprefix("error: ")):
            sys.exit(ended.code if isinstance(ended.code, int) else 1)
        raise
    LAUNCH.end()


def start() -> None:
    """Run the program, and turn every exception into an exit code."""
    logging.raiseExceptions = False  # a closed pipe behind the program must not bury it in messages about itself
    before = os.environ.get("HYDRA_FULL_ERROR", "0")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then hands its errors on, instead of printing them its own way
    try:
        with STOP:
            with STOP.deferred():  # for several processes torch is imported
                LAUNCH.join()
            arguments = LAUNCH.arguments(sys.argv[1:])
            if arguments is not None:
                sys.argv[1:] = arguments
                train()
    except KeyboardInterrupt:
        sys.exit(130)
    except RunInterrupted as stopped:
        if LAUNCH.world.report_failure(str(stopped)) and not stopped.told:
            print(f"{stopped}{sweep.how_to_go_on()}", file=sys.stderr)
        sys.exit(stopped.exit_code)
    except Exception as error:
        take_back_unbegun_sweep()
        fail(error)
    finally:
        os.environ["HYDRA_FULL_ERROR"] = before


if __name__ == "__main__":
    main()
