"""Logs a run to MLflow."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vitmnist.config.schema import dotted_keys
from vitmnist.errors import MissingExtraError, first_line
from vitmnist.metrics.epoch_record import EpochRecord
from vitmnist.tracking.loggers import LOGGERS, Logger, collect_epoch_scalars, collect_step_scalars
from vitmnist.tracking.result import Result

if TYPE_CHECKING:
    from PIL import Image

BATCH = 100
"""How many parameters MLflow accepts at once; of metrics, it accepts more."""


@dataclass
class MLflowOptions:
    """The options of `logger=[{name: mlflow, …}]`. With `uri: null`, MLflow reads MLFLOW_TRACKING_URI."""

    experiment: str = "vitmnist"
    uri: str | None = None


@contextmanager
def errors_of_mlflow() -> Iterator[None]:
    """Turn an error of MLflow into an `OSError`, after which a run is saved."""
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        raise OSError(f"mlflow: {first_line(error)}") from error


@LOGGERS.register("mlflow", MLflowOptions)
class MLflow(Logger):
    """Logs the metrics and images of a run under the same tags as TensorBoard, by epoch and step.

    Each start is a run of MLflow with all epochs from the first, as with wandb.

    Raises:
        MissingExtraError: MLflow is not installed.
    """

    def __init__(self, options: MLflowOptions, folder: Path, result: Result) -> None:
        try:
            from mlflow import MlflowClient, entities
        except ImportError as error:
            raise MissingExtraError("mlflow", "mlflow") from error
        config = result.config or {}
        tags = {"folder": str(folder.absolute()), **dict.fromkeys(config.get("tags") or (), "true")}
        if notes := config.get("notes"):
            tags["mlflow.note.content"] = notes
        self._metric = entities.Metric
        parameters = [entities.Param(_key(key), str(value)) for key, value in dotted_keys(config).items()]
        with errors_of_mlflow():
            self._client = MlflowClient(options.uri)
            experiment = self._client.get_experiment_by_name(options.experiment)
            identifier = experiment.experiment_id if experiment else self._client.create_experiment(options.experiment)
            run = self._client.create_run(identifier, tags=tags, run_name=config.get("name") or folder.name)
            self._id = run.info.run_id
            for first in range(0, len(parameters), BATCH):
                self._client.log_batch(self._id, params=parameters[first : first + BATCH])
        for record in result.epochs:
            self.add_epoch(record)

    @errors_of_mlflow()
    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        failure = "FAILED" if kind and issubclass(kind, Exception) else "KILLED"
        self._client.set_terminated(self._id, failure if kind else "FINISHED")

    @errors_of_mlflow()
    def add_epoch(self, record: EpochRecord) -> None:
        values = [(collect_epoch_scalars(record), record["epoch"])]
        values += [(collect_step_scalars(step), step["step"]) for step in record["steps"]]
        ended_at = int(1000 * record["ended_at"])
        metrics = [
            self._metric(_key(tag), value, ended_at, step + 1)
            for scalars, step in values
            for tag, value in scalars.items()
        ]
        for first in range(0, len(metrics), BATCH):
            self._client.log_batch(self._id, metrics[first : first + BATCH])

    @errors_of_mlflow()
    def add_images(self, images: Mapping[str, Image.Image], epoch: int) -> None:
        for name, image in images.items():
            self._client.log_image(self._id, image, key=name, step=epoch + 1)


def _key(name: str) -> str:
    """Replace the characters that MLflow refuses in names."""
    return re.sub(r"[^\w./ -]", "_", name)
