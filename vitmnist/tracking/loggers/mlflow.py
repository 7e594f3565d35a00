"""Logs a run to MLflow."""

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from PIL import Image

from vitmnist.config.schema import flatten_keys
from vitmnist.errors import MissingExtraError, first_line
from vitmnist.metrics.epoch_record import EpochRecord
from vitmnist.tracking.loggers import LOGGERS, Logger, get_epoch_scalars, get_run_scalars, get_step_scalars
from vitmnist.tracking.result import Result


@dataclass
class MLflowOptions:
    """The options of `logger=[{name: mlflow, …}]`. With `uri: null`, MLflow reads MLFLOW_TRACKING_URI."""

    experiment: str = "vitmnist"
    uri: str | None = None


@LOGGERS.register("mlflow", MLflowOptions)
class MLflow(Logger):
    """Logs metrics and images under the tags of TensorBoard; each start is a run of MLflow with all epochs."""

    def __init__(self, options: MLflowOptions, folder: Path, result: Result) -> None:
        try:
            import mlflow
        except ImportError as error:
            raise MissingExtraError("mlflow", "mlflow") from error
        self._mlflow, self._result, config = mlflow, result, result.config or {}
        notes = {"mlflow.note.content": config["notes"]} if config.get("notes") else {}
        tags = {"folder": str(folder.absolute()), **dict.fromkeys(config.get("tags") or (), "true"), **notes}
        self._client = self._call(mlflow.MlflowClient, options.uri)
        title = options.experiment
        experiment = self._call(self._client.get_experiment_by_name, title)
        number = experiment.experiment_id if experiment else self._call(self._client.create_experiment, title)
        name = config.get("name") or folder.name
        self._id = self._call(self._client.create_run, number, tags=tags, run_name=name).info.run_id
        params = [mlflow.entities.Param(_key(key), str(value)) for key, value in flatten_keys(config).items()]
        self._log("params", params)
        for record in result.epochs:
            self.add_steps(record["steps"])
            self.add_epoch(record)

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        self._log("metrics", self._metrics(get_run_scalars(self._result), len(self._result.epochs), time.time()))
        failure = "FAILED" if kind and issubclass(kind, Exception) else "KILLED"
        self._call(self._client.set_terminated, self._id, failure if kind else "FINISHED")

    def add_steps(self, steps: Sequence[Mapping[str, Any]]) -> None:
        metrics = [self._metrics(get_step_scalars(step), step["step"] + 1, time.time()) for step in steps]
        self._log("metrics", [*chain.from_iterable(metrics)])

    def add_epoch(self, record: EpochRecord) -> None:
        scalars = get_epoch_scalars(record, self._result)
        self._log("metrics", self._metrics(scalars, record["epoch"] + 1, record["ended_at"]))

    def add_images(self, images: Mapping[str, Image.Image], epoch: int) -> None:
        for name, image in images.items():
            self._call(self._client.log_image, self._id, image, key=name, step=epoch + 1)

    def _metrics(self, scalars: Mapping[str, float], step: int, ended_at: float) -> list[Any]:
        make = self._mlflow.entities.Metric
        return [make(_key(tag), value, int(1000 * ended_at), step) for tag, value in scalars.items()]

    def _log(self, kind: str, values: list[Any]) -> None:
        for first in range(0, len(values), 100):  # MLflow takes 100 parameters at a time.
            self._call(self._client.log_batch, self._id, **{kind: values[first : first + 100]})

    def _call(self, function: Any, *arguments: object, **options: object) -> Any:
        try:
            return function(*arguments, **options)
        except self._mlflow.exceptions.MlflowException as error:
            raise OSError(f"mlflow: {first_line(error)}") from error


def _key(name: str) -> str:
    """Replace the characters that MLflow refuses in names."""
    return re.sub(r"[^\w./ -]", "_", name)
