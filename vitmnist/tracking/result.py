"""`result.json`: what a run did, its results, and how it ended."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from vitmnist.config.schema import Config
from vitmnist.config.values import flatten
from vitmnist.errors import ConfigError, DataError, PeerError
from vitmnist.runtime.cpu import Cores
from vitmnist.runtime.failures import classify, os_error, worker_error
from vitmnist.runtime.files import write_atomic
from vitmnist.runtime.records import csv_text
from vitmnist.runtime.signals import StopSignal, interruption
from vitmnist.runtime.world import World
from vitmnist.timing.table import Bottleneck, format_bottleneck
from vitmnist.tracking.epoch_table import EpochRecord, epoch_metrics, summarize, summary_metrics

# The folder of a run has these records, as Hydra writes them.
CONFIG, OVERRIDES = Path(".hydra/config.yaml"), Path(".hydra/overrides.yaml")


@dataclass(kw_only=True)
class Result:
    """The content of `result.json`; docs/records.md describes each key.

    `status` is completed, failed or interrupted. It is failed until the run ends.
    """

    status: str = "failed"
    error: str | None = None
    exit_code: int | None = None
    overrides: list[str]
    choices: dict[str, str]
    config: dict[str, Any] | None = None
    auto: dict[str, Any] | None = None
    loader: dict[str, Any] | None = None
    trainer: dict[str, Any] | None = None
    batch_size: int | None = None
    seed: int | None = None
    device: str | None = None
    distributed: dict[str, Any] | None = None
    eval_split: str | None = None
    resumed: bool = False
    stopped_early: bool = False
    test: dict[str, Any] | None = None
    began_at: float = field(default_factory=time.time)
    ended_at: float | None = None
    setup_s: float | None = None
    compile_s: float | None = None
    epochs: list[EpochRecord] = field(default_factory=list)
    dataset: dict[str, Any] | None = None
    environment: dict[str, Any] | None = None

    def summary(self) -> dict[str, float | None]:
        """The run as a whole: `summary_metrics` of its epochs, and the seconds before the first; None: not measured."""
        return {
            **{key: summarize(self.epochs, metric) for key, metric in summary_metrics().items()},
            "setup_s": self.setup_s,
            "compile_s": self.compile_s,
        }

    def bottleneck(self) -> Bottleneck | None:
        """What limits training, the loader or the step; None before the end of an epoch."""
        waiting_pct, steps, cores = self.summary()["data_wait_pct_median"], self._steps(), self._cores()
        if waiting_pct is None or not steps:
            return None
        return Bottleneck.of(waiting_pct, steps, cores is None or cores.compete)

    def verdict(self) -> str | None:
        """The same in one sentence."""
        bottleneck, waiting_pct = self.bottleneck(), self.summary()["data_wait_pct_median"]
        if bottleneck is None or waiting_pct is None:
            return None
        return format_bottleneck(bottleneck, waiting_pct, self._steps(), self._cores())

    def _steps(self) -> int:
        images = (self.dataset or {}).get("train_size") or 0
        return len(self.epochs) * -(-images // self.batch_size) if self.batch_size else 0

    def _cores(self) -> Cores | None:
        busy = self.epochs[-1].get("cores_busy") if self.epochs else None
        available = (self.environment or {}).get("cpu_count")
        return None if busy is None or available is None else Cores(available, busy)

    def write(self, folder: Path) -> None:
        """Write `result.json` into `folder` atomically.

        Raises:
            OSError: it cannot be written.
        """
        self.ended_at = time.time()
        content = asdict(self) | {"summary": self.summary(), "verdict": self.verdict()}
        del content["setup_s"], content["compile_s"]
        write_atomic(folder / "result.json", json.dumps(content, indent=2, allow_nan=False).encode())

    def write_epochs(self, folder: Path) -> None:
        """Write `epochs.csv`, for spreadsheets and pandas: a row for each epoch; raises `OSError`."""
        write_atomic(folder / "epochs.csv", csv_text(epoch_columns(), self.epochs).encode())

    def append_epoch(self, folder: Path) -> None:
        """Append the last epoch to `epochs.csv`; raises `OSError`. Rewriting it slows a run of 1,000 epochs by half."""
        path, text = folder / "epochs.csv", csv_text(epoch_columns(), self.epochs[-1:])
        try:
            with path.open("ab") as file:
                file.write(text.partition("\n")[2].encode())  # without the titles
        except OSError as error:
            error.filename = str(path)  # an error of `write` has no filename
            raise

    def write_config(self, folder: Path) -> None:
        """Write the configuration that `resume=` reads, and for people the overrides; raises `OSError`."""
        (folder / CONFIG).parent.mkdir(exist_ok=True)
        for name, record in ((CONFIG, self.config), (OVERRIDES, self.overrides)):
            write_atomic(folder / name, yaml.safe_dump(record, sort_keys=False, allow_unicode=True).encode())


def epoch_columns() -> tuple[str, ...]:
    """The columns of `epochs.csv`."""
    return "epoch", *epoch_metrics(), "first_of_start", "ended_at"


def choices_of(config: Mapping[str, Any]) -> dict[str, str]:
    """The registered name that was chosen in each config group: `{"model": "vit", "loader": "ram", …}`."""
    names = {key: value for key, value in flatten(config).items() if key.endswith(".name") and value is not None}
    return {key.removeprefix("data.").removesuffix(".name"): str(name) for key, name in names.items()}


log = logging.getLogger(__name__)


@contextmanager
def recording_outcome(result: Result, config: Config, folder: Path, stop: StopSignal, world: World) -> Iterator[None]:
    """Record in `result.json` how the block ended, once training has begun."""
    try:
        yield
    except BaseException as raised:
        error = world.root_cause(raised)
        if stop.request and worker_error(error):
            error = interruption(stop.request)  # the signal that stops the run stops its workers too
        record_failure(error, result, config, folder, world)
        if error is raised:
            raise
        raise error from raised
    world.disconnect()
    result.status = "completed"
    if world.is_main:
        result.write(folder)


def record_failure(error: BaseException, result: Result, config: Config, folder: Path, world: World) -> None:
    """Record why a run ended before its end."""
    has_begun, failure = result.setup_s is not None, classify(error)
    if failure.status == "interrupted" and has_begun:
        world.disconnect()
    is_refused = isinstance(error, ConfigError | DataError | PeerError)
    if not has_begun and (is_refused or config.resume):  # nothing to record
        return
    result.status, result.error, result.exit_code = failure.status, failure.message, failure.exit_code
    try:
        if world.is_main:
            result.write(folder)
    except OSError as unwritten:  # must not hide the error that ended the run
        log.warning("cannot write the records: %s", os_error(unwritten))
