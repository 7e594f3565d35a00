"""The command line: `python train.py`, `python -m vitmnist` and `vitmnist` are the same program."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from pathlib import Path
from typing import NoReturn

import hydra
from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from vitmnist.config import register_schema
from vitmnist.errors import ConfigError, DataError, UserError
from vitmnist.explain import explain

log = logging.getLogger(__name__)

PACKAGE = Path(__file__).resolve().parent
# A wheel carries conf/ inside the package; in a source tree it stands beside it.
CONF = next(folder for folder in (PACKAGE / "conf", PACKAGE.parent / "conf") if folder.is_dir())

SHOW_TRACEBACK = os.environ.get("HYDRA_FULL_ERROR") == "1"

register_schema()


@hydra.main(config_path=str(CONF), config_name="config", version_base="1.3")
def train(composed: DictConfig) -> None:
    """One run; Hydra calls this once for a run and once for each job of a sweep."""
    from vitmnist.run import run  # imports torch: not before Hydra has answered --help

    job = HydraConfig.get()
    folder = Path(job.runtime.output_dir)
    try:
        run(composed, folder, list(job.overrides.task), chosen(job.runtime.choices))
    except Exception as error:
        if job.mode == RunMode.MULTIRUN:
            # At once, and into the job's own log: Hydra tells of it when all the other jobs are done.
            log.error("job %s failed: %s", job.job.num, error, exc_info=not isinstance(error, UserError))
            raise
        if isinstance(error, ConfigError | DataError):
            discard(folder, job)
        fail(error)
    here = os.path.relpath(folder)
    log.info("records in %s; look at them with\n    tensorboard --logdir %s", here, here)


def chosen(choices: dict[str, str | None]) -> dict[str, str | None]:
    """The chosen member of each of our groups: `{"model": "vit", "loader": "prefetch", "loader.base": "ram", …}`."""
    return {
        group.split("@")[-1].replace("/", ".").removeprefix("data."): choice
        for group, choice in choices.items()
        if not group.startswith("hydra/")
    }


def discard(folder: Path, job: HydraConf) -> None:
    """Remove what a run left that never began; a folder that holds anything else stays."""
    record = folder / (job.output_subdir or ".hydra")
    for file in (folder / "result.json", folder / f"{job.job.name}.log", *record.glob("*.yaml")):
        file.unlink(missing_ok=True)
    for empty in (record, folder, folder.parent):
        with contextlib.suppress(OSError):  # it holds something else, or is not there
            empty.rmdir()


def fail(error: BaseException) -> NoReturn:
    """End with one message and exit code 1; with a traceback where it was asked for, or the program is at fault."""
    message = explain(error, CONF)
    if SHOW_TRACEBACK or message is None:
        raise error
    sys.exit(f"error: {message}")


def main() -> None:
    """Run the program."""
    # Hydra then hands its errors on, instead of printing them its own way.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        train()
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        fail(error)
    finally:
        if not SHOW_TRACEBACK:
            del os.environ["HYDRA_FULL_ERROR"]


if __name__ == "__main__":
    main()
