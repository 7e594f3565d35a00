"""`result.json`: what a run did, its results, and how it ended; finds runs, and reads their records."""

from __future__ import annotations

import json
import logging
import math
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import yaml

from vitmnist.config.schema import Config, flatten
from vitmnist.errors import ConfigError, DataError, PeerError, classify
from vitmnist.metrics.epoch_record import EpochRecord, epochs_of_last_start, steady_epochs, summarize
from vitmnist.metrics.epoch_table import DATA_WAIT_PCT, EPOCH_S, Metric, epoch_metrics, find_metric
from vitmnist.metrics.monitor import Monitor
from vitmnist.runtime.files import UnreadableError, append, csv_text, read_plain, write_atomic
from vitmnist.runtime.run_folder import is_in_use
from vitmnist.runtime.signals import StopSignal, interruption
from vitmnist.runtime.world import World
from vitmnist.timing.table import Bottleneck, format_bottleneck

log = logging.getLogger(__name__)

ENDED = ("completed", "failed", "interrupted")
"""The values that `status` has in `result.json`."""
TEST_ACC = "test_acc"
"""The key of the accuracy in the section `test` of `result.json`."""
CONFIG, OVERRIDES = Path(".hydra/config.yaml"), Path(".hydra/overrides.yaml")
"""The records of the configuration and the command line in the folder of a run, under Hydra's names."""


@dataclass(kw_only=True)
class Result:
    """The content of `result.json`; docs/records.md describes each key.

    `status` is completed, failed or interrupted. It is failed until the run ends.
    """

    status: str = "failed"
    error: str | None = None
    exit_code: int | None = None
    overrides: list[str] = field(default_factory=list)
    config: dict[str, Any] | None = None
    auto: dict[str, Any] | None = None
    loader: dict[str, Any] | None = None
    trainer: dict[str, Any] | None = None
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

    @classmethod
    def from_json(cls, path: Path) -> Result:
        """The record in a file. A key that it lacks has its default.

        Raises:
            FileNotFoundError: there is no such file.
            UnreadableError: it cannot be read, or is not a record.
        """
        content = read_plain(path)
        if not isinstance(content, dict) or content.get("status") not in ENDED or "epochs" not in content:
            raise UnreadableError("is not the result of a run")
        recorded = [item for item in fields(cls) if item.name in content]
        types = get_type_hints(cls)
        for item in recorded:
            if not _has_type(content[item.name], types[item.name]):
                raise UnreadableError(f"{item.name} must be {item.type}, not {content[item.name]!r:.40}")
        for values in [*content["epochs"], content.get("test") or {}]:
            is_valid = isinstance(values, dict) and all(
                _has_type(values.get(metric), float | None) for metric in (*epoch_metrics(), TEST_ACC)
            )
            if not (is_valid and 0 < (values.get(EPOCH_S.name) or 1.0) < math.inf):
                raise UnreadableError("an epoch or the test has a value that is not a number")
        return cls(**{item.name: content[item.name] for item in recorded})

    def bottleneck(self) -> Bottleneck | None:
        """What limits training, the loader or the step; None before the end of an epoch."""
        waiting = self._waiting()
        return Bottleneck.of(*waiting) if waiting else None

    def verdict(self) -> str | None:
        """What limits training, in one sentence."""
        waiting = self._waiting()
        return format_bottleneck(Bottleneck.of(*waiting), *waiting) if waiting else None

    def _waiting(self) -> tuple[float, int] | None:
        """The percentage of training spent waiting for data, and the number of steps since the last start."""
        waiting_pct = summarize(self.epochs, DATA_WAIT_PCT)
        images = (self.dataset or {}).get("train_size", 0)
        batches = math.ceil(images / (self.config or {}).get("batch_size", math.inf))
        steps = len(epochs_of_last_start(self.epochs)) * batches
        return None if waiting_pct is None or not steps else (waiting_pct, steps)

    def write(self, folder: Path) -> None:
        """Write `result.json` into `folder` atomically.

        Raises:
            OSError: it cannot be written.
        """
        self.ended_at = time.time()
        content = asdict(self) | {"verdict": self.verdict()}
        write_atomic(folder / "result.json", json.dumps(content, indent=2, allow_nan=False).encode())

    def write_epochs(self, folder: Path) -> None:
        """Write `epochs.csv`, for spreadsheets and pandas: a row for each epoch; raises `OSError`."""
        write_atomic(folder / "epochs.csv", csv_text(epoch_columns(), self.epochs).encode())

    def append_epoch(self, folder: Path) -> None:
        """Append the last epoch to `epochs.csv`; raises `OSError`. Rewriting it slows a run of 1,000 epochs by half."""
        _, _, row = csv_text(epoch_columns(), self.epochs[-1:]).partition("\n")
        append(folder / "epochs.csv", row.encode())

    def write_config(self, folder: Path) -> None:
        """Write the configuration that `resume=` reads, and for people the overrides; raises `OSError`."""
        (folder / CONFIG).parent.mkdir(exist_ok=True)
        for name, record in ((CONFIG, self.config), (OVERRIDES, self.overrides)):
            write_atomic(folder / name, yaml.safe_dump(record, sort_keys=False, allow_unicode=True).encode())


def _has_type(value: object, annotation: Any) -> bool:
    """Whether a value in JSON has a type such as `dict[str, Any] | None`. JSON writes whole floats as integers too."""
    types = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    classes = tuple(get_origin(item) or item for item in types)
    return isinstance(value, (*classes, int) if float in classes else classes)


def epoch_columns() -> tuple[str, ...]:
    """The columns of `epochs.csv`."""
    return "epoch", *epoch_metrics(), "first_of_start", "ended_at"


@contextmanager
def recording_outcome(result: Result, config: Config, folder: Path, stop: StopSignal, world: World) -> Iterator[None]:
    """Record in `result.json` how the block ended, once training has begun."""
    try:
        yield
    except BaseException as raised:
        error = world.first_failure(raised)
        if stop.request and classify(error).cause == "worker":
            # The signal that stops the run stops its workers too.
            error = interruption(stop.request)
        record_failure(error, result, config, folder, world)
        if error is raised:
            raise
        raise error from raised
    world.disconnect()
    result.status = "completed"
    if world.is_main:
        result.write(folder)


def record_failure(error: BaseException, result: Result, config: Config, folder: Path, world: World) -> None:
    """Record why a run ended before its end. A run that was refused before it began has no record."""
    has_begun = result.setup_s is not None
    failure = classify(error)
    if failure.status == "interrupted" and has_begun:
        world.disconnect()
    is_refused = isinstance(error, ConfigError | DataError | PeerError)
    if not has_begun and (is_refused or config.resume):
        return
    result.status, result.error, result.exit_code = failure.status, failure.message, failure.exit_code
    try:
        if world.is_main:
            result.write(folder)
    except OSError as unwritten:
        # This must not hide the error that ended the run.
        log.warning("cannot write the records: %s", classify(unwritten).message)


@dataclass(frozen=True)
class Run:
    """A run and its record.

    Args:
        result: `result.json`. Without one that can be read, its status is running, killed, not started, or unreadable.
        overlapping: another run was active on the same machine at the same time.
    """

    folder: Path
    result: Result
    overlapping: bool = False

    @property
    def status(self) -> str:
        """How the run ended, or how far it has got."""
        return self.result.status

    @cached_property
    def config(self) -> dict[str, Any]:
        """The configuration by full keys such as `data.loader.name`; empty if unknown."""
        return flatten(self.result.config or {})

    @property
    def seeds(self) -> str:
        """The seed, and the seed of a hold-out, as overrides; runs with equal seeds have the same quality."""
        keys = ["seed", "data.holdout_seed"] if self.config.get("data.holdout") else ["seed"]
        return " ".join(f"{key}={self.config.get(key)}" for key in keys)

    @property
    def is_ranked(self) -> bool:
        """Whether its times are compared: it completed, had the machine to itself, and has a steady epoch."""
        return self.status == "completed" and not self.overlapping and bool(steady_epochs(self.result.epochs))

    @property
    def status_text(self) -> str:
        """How the run ended and why, and why its times are not compared."""
        if self.status != "completed":
            return f"{self.status}: {self.result.error}" if self.result.error else self.status
        parts = ["completed"]
        if self.result.resumed:
            parts.append("resumed")
        if self.overlapping:
            parts.append("overlapping")
        if not steady_epochs(self.result.epochs):
            parts.append("first epoch only")
        return ", ".join(parts)

    def quality(self, name: str) -> float | None:
        """A metric after the best epoch if there was a validation split to choose it by, else after the last.

        A name such as `test_acc` is of the test split, evaluated once at the end.
        """
        if name.startswith("test_"):
            return (self.result.test or {}).get(name)
        epochs = self.result.epochs
        if self.result.eval_split == "validation":
            best = Monitor(monitored([self])).best_epoch(epochs)
            epochs = epochs if best is None else epochs[: best + 1]
        return summarize(epochs, epoch_metrics()[name])


def monitored(runs: Iterable[Run]) -> Metric:
    """The metric that runs monitor; the accuracy if they monitor several, or one that is unknown here."""
    names = {str(run.config.get("monitor", "eval_acc")) for run in runs if run.config}
    if len(names) == 1:
        with suppress(ConfigError):
            return find_metric(names.pop(), "monitor")
    return epoch_metrics()["eval_acc"]


def find_runs(folders: Iterable[Path]) -> list[Path]:
    """The folders of all runs in or below some folders, each once, in the order of their job numbers.

    Raises:
        DataError: a folder does not exist, or contains no runs.
    """
    by_path: dict[Path, Path] = {}
    for folder in folders:
        runs = {path.parent for name in ("result.json", ".hydra") for path in folder.rglob(name)}
        if not runs:
            problem = "contains no runs" if folder.is_dir() else "no such folder"
            raise DataError(f"{folder}: {problem}; name a folder such as outputs/sweeps/DATE/TIME")
        for run in sorted(runs, key=_natural_key):
            by_path.setdefault(run.resolve(), run)
    return list(by_path.values())


def _natural_key(path: Path) -> list[int | str]:
    """A sort key that puts job 10 after job 9."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", str(path))]


def read_run(folder: Path) -> Run:
    """The run of a folder; with the status `unreadable` and the reason if its `result.json` is damaged."""
    try:
        return Run(folder, Result.from_json(folder / "result.json"))
    except UnreadableError as error:
        result = Result(status="unreadable", error=f"{folder.name}/result.json: {error}")
    except FileNotFoundError:
        if is_in_use(folder):
            result = Result(status="running")
        elif (folder / ".lock").exists():
            result = Result(status="killed", error="it left no result.json")
        else:
            result = Result(status="not started")
    with suppress(FileNotFoundError, UnreadableError):
        config = read_plain(folder / CONFIG)
        result.config = config if isinstance(config, dict) else None
    return Run(folder, result)


SEARCH_RESULT = "optimization_results.yaml"
"""The file that a search writes into the folder of its sweep."""


def search_summary(folder: Path) -> str:
    """The sentence about the best trial in the folder of a search; empty if there is none."""
    values: object = None
    with suppress(FileNotFoundError, UnreadableError):
        values = read_plain(folder / SEARCH_RESULT)
    return str(values.get("summary") or "") if isinstance(values, dict) else ""  # Other sweepers write such a file too.
