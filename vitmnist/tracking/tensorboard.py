"""Writes a run to TensorBoard: metrics of epochs and steps, images, the configuration, and its row in HParams."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams import api_pb2
from torch.utils.tensorboard import RecordWriter
from torch.utils.tensorboard.summary import custom_scalars, image, text

from vitmnist.runtime.signals import RunInterrupted
from vitmnist.tracking import hparams
from vitmnist.tracking.images import confusion_matrix, training_batch, worst_mistakes
from vitmnist.tracking.metrics import METRICS, EpochRecord
from vitmnist.tracking.result import Result
from vitmnist.training.metrics import Predictions
from vitmnist.training.setup import TrainSetup

log = logging.getLogger(__name__)

# TensorBoard reads the event files of a folder in the order of their names: EVENTS, followed by the time of the start,
# comes between the other two.
CONFIG, EVENTS, STATUS = "config.tfevents", "events.out.tfevents", "status.tfevents"

TAGS = {metric.tag: metric.name for metric in METRICS}
STEP_TAGS = {"step/loss": "loss", "step/lr": "lr", "step/grad_norm": "grad_norm"}

# The charts of the "custom scalars" dashboard; each shows all runs.
LAYOUT = {
    "Epoch time": {
        "epoch time, s": ["Multiline", ["time/epoch_s"]],
        "waiting for data, s": ["Multiline", ["time/data_wait_s"]],
        "training throughput, images/s": ["Multiline", ["throughput/images_per_s"]],
    },
    "Learning curves": {
        "accuracy, %": ["Multiline", ["eval/acc"]],
        "loss": ["Multiline", ["train/loss", "eval/loss"]],
    },
}


class TensorBoard:
    """The event files of one run; a context manager, whose exception decides the run's status in HParams.

    Epochs and steps count from 1 here, as in the log, and from 0 in the records. Events are written when they are
    added, without `SummaryWriter`, whose thread prints a traceback if it cannot write.

    Raises:
        OSError: a file cannot be written; so do the methods.
    """

    def __init__(self, folder: Path, result: Result) -> None:
        self._folder, self._result = folder, result
        # TensorBoard keeps the first configuration and status that it reads of a run, so a resumed run replaces both.
        (folder / STATUS).unlink(missing_ok=True)
        config = f"```yaml\n{yaml.safe_dump(result.config, sort_keys=False)}```"
        _replace(folder / CONFIG, *hparams.session_start(result), text("config", config), custom_scalars(LAYOUT))
        # Hide what an interrupted run wrote after its last checkpoint. TensorBoard drops all tags from this step on, so
        # the `step/…` tags, which count faster than epochs, are written again from the records.
        self._path, first = folder / f"{EVENTS}.{time.time_ns()}", len(result.epochs) + 1
        version = Event(wall_time=time.time(), step=first, file_version="brain.Event:2")
        start = Event(wall_time=time.time(), step=first, session_log=SessionLog(status=SessionLog.START))
        again = [event for record in result.epochs for event in _steps(record, first)]
        _append(self._path, version, start, *again)

    def __enter__(self) -> TensorBoard:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        summary = self._result.summary()
        tags = {f"summary/{key}": key for key in summary}
        try:
            _append(self._path, *_scalars(tags, summary, len(self._result.epochs), time.time()))
            # HParams has no status for a run that may be resumed; without one it shows "unknown".
            if kind is not None and issubclass(kind, RunInterrupted | KeyboardInterrupt):
                return
            status = api_pb2.STATUS_FAILURE if kind else api_pb2.STATUS_SUCCESS
            _replace(self._folder / STATUS, hparams.session_end(status))
        except OSError as error:
            if kind is None:
                raise
            log.warning("%s: cannot be written: %s", error.filename, error.strerror)  # the run failed before

    def add_epoch(self, record: EpochRecord) -> None:
        """Write an epoch's scalars, before its checkpoint is saved."""
        _append(self._path, *_scalars(TAGS, record, record["epoch"] + 1, record["ended_at"]), *_steps(record))

    def add_images(self, setup: TrainSetup, predictions: Predictions, epoch: int) -> None:
        """Draw the model's input in an epoch and its mistakes after it, before the epoch's checkpoint is saved.

        An image that cannot be drawn is left out with a warning.
        """
        train, test = setup.dataset.train, setup.dataset.test
        images: dict[str, Callable[[], Image.Image | None]] = {
            "training_batch": lambda: training_batch(train, setup.train_loader, setup.step.preprocess, epoch),
            "worst_mistakes": lambda: worst_mistakes(test, predictions),
            "confusion_matrix": lambda: confusion_matrix(test, predictions),
        }
        for name, draw in images.items():
            try:
                drawn = draw()
            except Exception as error:  # not worth the run
                log.warning("images/%s could not be drawn: %s: %s", name, type(error).__name__, error)
                continue
            if drawn is not None:
                summary = image(f"images/{name}", np.asarray(drawn), dataformats="HWC")
                _append(self._path, Event(wall_time=time.time(), step=epoch + 1, summary=summary))


def _steps(record: EpochRecord, first: int = 1) -> Iterator[Event]:
    """The logged steps of an epoch from step `first` on."""
    for values in record["steps"]:
        if values["step"] + 1 >= first:
            yield from _scalars(STEP_TAGS, values, values["step"] + 1, record["ended_at"])


def _scalars(names: Mapping[str, str], values: Mapping[str, Any], step: int, wall_time: float) -> Iterator[Event]:
    """The values that were measured, by the tags of their names; an event each, so that a torn file loses few."""
    for tag, name in names.items():
        if values.get(name) is not None:
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=values[name])])
            yield Event(wall_time=wall_time, step=step, summary=summary)


def _replace(path: Path, *summaries: Summary) -> None:
    path.unlink(missing_ok=True)  # not truncated: TensorBoard may be reading it
    _append(path, *(Event(wall_time=time.time(), summary=summary) for summary in summaries))


def _append(path: Path, *events: Event) -> None:
    try:
        with path.open("ab") as file:
            writer = RecordWriter(file)
            for event in events:
                writer.write(event.SerializeToString())
    except OSError as error:
        error.filename = str(path)  # which an error of `write` lacks
        raise
