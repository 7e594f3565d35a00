"""The base class of loggers, and their registry: every module in this folder may register one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vitmnist.metrics.epoch_record import EpochRecord
from vitmnist.metrics.epoch_table import epoch_metrics
from vitmnist.registry import OptionsClass, Registry

if TYPE_CHECKING:
    from PIL import Image


STEP_METRICS = ("loss", "lr", "grad_norm")
"""The values of a logged step."""


class Logger:
    """Sends a run elsewhere; rank 0 alone has one. A context manager, entered once the run is set up.

    Built with (options, folder of the run, result), where `result` grows with the run. A resumed run builds another one
    for the same folder, whose `result.epochs` are those before; it has to drop what it got of later ones.

    Raises:
        OSError: it cannot be reached; the methods may raise it too, and the run then ends with a checkpoint.
    """

    def __enter__(self) -> Logger:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        """End the run; `kind` is None if it was completed."""

    def add_epoch(self, record: EpochRecord) -> None:
        """Log an epoch, before its checkpoint is saved. Records count epochs and steps from 0."""
        raise NotImplementedError

    def add_images(self, images: Mapping[str, Image.Image], epoch: int) -> None:
        """Log images of an epoch, by name."""


def epoch_scalars(record: EpochRecord) -> dict[str, float]:
    """The measured metrics of an epoch, by their tags."""
    return {metric.tag: record[name] for name, metric in epoch_metrics().items() if record.get(name) is not None}


def step_scalars(step: Mapping[str, float | None]) -> dict[str, float]:
    """The measured values of a logged step, by their tags."""
    return {f"step/{name}": value for name in STEP_METRICS if (value := step.get(name)) is not None}


LOGGERS: Registry[OptionsClass, Logger] = Registry("logger", __package__)


def parse_loggers(values: Sequence[Any]) -> list[Mapping[str, Any]]:
    """The name and all options of each configured logger, which is a name or a mapping with `name` and options.

    Raises:
        ConfigError: an unknown name or option.
    """
    named = [{"name": value} if isinstance(value, str) else value for value in values]
    loggers = [LOGGERS.complete(value) if isinstance(value, Mapping) else value for value in named]
    for index, logger in enumerate(loggers):
        LOGGERS.resolve(logger, key=f"logger.{index}")
    return loggers
