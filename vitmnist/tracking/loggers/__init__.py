"""The base class of loggers, and their registry. A module in this folder registers a logger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitmnist.metrics.epoch_record import EpochRecord
from vitmnist.metrics.epoch_table import build_epoch_table
from vitmnist.registry import ConfigGroup
from vitmnist.tracking.result import Result, list_run_metrics
from vitmnist.tracking.runs import Run

if TYPE_CHECKING:
    from PIL import Image


class Logger(AbstractContextManager["Logger"]):
    """Sends the metrics of a run to another program. Rank 0 enters it as a context manager once set-up is done.

    A subclass is built with (options, folder of the run, result); `result.epochs` grows with the run. A resumed run
    builds another logger for the same folder. `result.epochs` then has the epochs before the checkpoint, and the logger
    must drop later epochs that it has logged.

    Raises:
        OSError: the other program cannot be reached. The methods may raise it too; the run then ends with a checkpoint.
    """

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        """End the run, after logging `get_run_scalars`; `kind` is None if the run was completed."""

    def add_steps(self, steps: Sequence[Mapping[str, Any]]) -> None:
        """Log steps as in `record["steps"]`: after each checkpoint within an epoch, and before `add_epoch`.

        The list can be empty. In a resumed run, it begins with the steps of the epoch from before the stop.
        """

    def add_epoch(self, record: EpochRecord) -> None:
        """Log an epoch before its checkpoint is saved. Records count epochs and steps from 0."""
        raise NotImplementedError

    def add_images(self, images: Mapping[str, Image.Image], epoch: int) -> None:
        """Log the images of an epoch, by name."""


def get_epoch_scalars(record: EpochRecord, result: Result) -> dict[str, float]:
    """Return the metrics of an epoch that were measured, and the value in the report until then, by tag."""
    values = {metric.tag: record.get(name) for name, metric in build_epoch_table().items()}
    for label, metrics in record.get("classes", {}).items():
        values |= {f"verbose_{name}/{label}": value for name, value in metrics.items()}
    run = Run(result.folder, replace(result, epochs=result.epochs[: record["epoch"] + 1]))
    if result.eval_split == "validation" and (metric := run.monitored_metric) and metric.depends_on_weights:
        values[f"train_result/best_{metric.name.removeprefix('eval_')}"] = run.value_of(metric.name)
    return {tag: value for tag, value in values.items() if value is not None}


def get_run_scalars(result: Result) -> dict[str, float]:
    """Return the values of a run that have a tag and were measured, such as the accuracy on the test split, by tag."""
    return {item.tag: value for item in list_run_metrics() if item.tag and (value := item.read(result)) is not None}


def get_step_scalars(step: Mapping[str, float | None]) -> dict[str, float]:
    """Return the metrics of a logged step that were measured, by tag."""
    return {f"train_step/{name}": value for name, value in step.items() if name != "step" and value is not None}


LOGGERS = ConfigGroup[object, [Path, Result], Logger]("logger", __package__)


def parse_loggers(values: Sequence[Any]) -> list[Mapping[str, Any]]:
    """Return loggers, names or mappings with `name`, as mappings; raises `ConfigError` for an unknown one."""
    loggers = [{"name": value} if isinstance(value, str) else value for value in values]
    for index, logger in enumerate(loggers):
        LOGGERS.resolve(logger, f"logger.{index}", complete=True)
    return loggers
