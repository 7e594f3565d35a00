"""The command line: `python train.py`, `python -m vitmnist` and `vitmnist` are the same program."""

from __future__ import annotations

import logging
import os
import shlex
import sys
import traceback
from pathlib import Path
from typing import NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from vitmnist.config import CONF
from vitmnist.errors import ConfigError, DataError, UserError
from vitmnist.explain import explain
from vitmnist.folders import take_back, take_back_unbegun_sweep
from vitmnist.resume import expand
from vitmnist.stop import Stop, Stopped

log = logging.getLogger(__name__)

SHOW_TRACEBACK = os.environ.get("HYDRA_FULL_ERROR") == "1"

STOP = Stop()


@hydra.main(config_path=str(CONF), config_name="config", version_base="1.3")
def train(composed: DictConfig) -> None:
    """One run; Hydra calls this once for a run and once for each job of a sweep."""
    # These import torch: not before Hydra has answered --help. An import cannot be stopped in the middle.
    with STOP.deferred():
        from vitmnist.records.result import Result
        from vitmnist.run import choices_of, run

    job = HydraConfig.get()
    folder = Path(job.runtime.output_dir)
    shown = os.path.relpath(folder)
    overrides: list[str] = OmegaConf.to_container(job.overrides.task)  # type: ignore[assignment]
    try:
        STOP.after_minutes(None)  # those of the job before
        STOP.check()
        run(composed, folder, overrides, STOP)
    except (Stopped, KeyboardInterrupt) as stopped:
        saved = any((folder / "checkpoints").glob("*.pt"))
        log.info("%s; records in %s", stopped if str(stopped) else "interrupted", shown)
        if job.mode == RunMode.MULTIRUN and isinstance(stopped, Stopped) and not stopped.exit_code:
            return  # the job's time is over, the sweep goes on
        if saved and job.mode == RunMode.RUN:
            log.info("go on with\n    python train.py %s", shlex.quote(f"resume={shown}"))
        raise
    except Exception as error:
        refused = isinstance(error, ConfigError | DataError)
        if job.mode == RunMode.MULTIRUN:
            if refused:
                Result(overrides=overrides, choices=choices_of(composed), error=str(error)).write(folder)
            # At once, and into the job's own log: Hydra tells of it when all the other jobs are done.
            log.error("job %s failed: %s", job.job.num, error, exc_info=not isinstance(error, UserError))
            # Hydra keeps the error to the end of the sweep, and its frames would keep the model and the loaders.
            reason: BaseException | None = error
            while reason is not None:
                traceback.clear_frames(reason.__traceback__)
                reason = reason.__cause__ or reason.__context__
            raise
        if refused:
            take_back()
        else:
            log.info("failed; records in %s", shown)
        fail(error)
    log.info("records in %s; look at them with\n    tensorboard --logdir %s", shown, shlex.quote(shown))


def fail(error: BaseException) -> NoReturn:
    """End with one message and exit code 1; with a traceback where it was asked for, or the program is at fault."""
    message = explain(error, CONF)
    if SHOW_TRACEBACK or message is None:
        raise error
    sys.exit(f"error: {message}")


def main() -> None:
    """Run the program."""
    logging.raiseExceptions = False  # a closed pipe behind the program must not bury it in messages about itself
    before = os.environ.get("HYDRA_FULL_ERROR", "0")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then hands its errors on, instead of printing them its own way
    try:
        sys.argv[1:] = expand(sys.argv[1:])
        with STOP:
            train()
    except KeyboardInterrupt:
        sys.exit(130)
    except Stopped as stopped:
        sys.exit(stopped.exit_code)
    except Exception as error:
        take_back_unbegun_sweep()
        fail(error)
    finally:
        os.environ["HYDRA_FULL_ERROR"] = before


if __name__ == "__main__":
    main()
