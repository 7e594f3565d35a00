"""Writes a run to TensorBoard: metrics of epochs and steps, images, the configuration, and its row in HParams."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams import api_pb2
from tensorboard.summary.writer import event_file_writer
from torch.utils.tensorboard import RecordWriter, SummaryWriter
from torch.utils.tensorboard.summary import custom_scalars, text

from vitmnist.errors import DataError
from vitmnist.runtime.signals import RunInterrupted
from vitmnist.tracking import hparams
from vitmnist.tracking.images import confusion_matrix, training_batch, worst_mistakes
from vitmnist.tracking.metrics import METRICS, EpochRecord
from vitmnist.tracking.result import Result
from vitmnist.training.metrics import Predictions
from vitmnist.training.setup import TrainSetup

log = logging.getLogger(__name__)

# TensorBoard reads the event files of a folder in the order of their names: these two come before and after
# SummaryWriter's `events.out.tfevents.…`.
CONFIG, STATUS = "config.tfevents", "status.tfevents"

TAGS = {metric.name: metric.tag for metric in METRICS}
STEP_TAGS = {"loss": "step/loss", "lr": "step/lr", "grad_norm": "step/grad_norm"}

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

    Epochs and steps count from 1 here, as in the log, and from 0 in the records.
    """

    def __init__(self, folder: Path, result: Result) -> None:
        self._folder, self._result = folder, result
        # TensorBoard keeps the first configuration and status that it reads of a run, so a resumed run replaces both.
        (folder / STATUS).unlink(missing_ok=True)
        config = f"```yaml\n{yaml.safe_dump(result.config, sort_keys=False)}```"
        with self._naming_errors():
            start = hparams.session_start(result)
            _write_events(folder / CONFIG, *start, text("config", config), custom_scalars(LAYOUT))
        # Hide what an interrupted run wrote after its last checkpoint. TensorBoard drops all tags from this step on, so
        # the `step/…` tags, which count faster than epochs, are written again from the records.
        first = len(result.epochs) + 1
        self._writer = SummaryWriter(str(folder), purge_step=first)
        for record in result.epochs:
            self._add_steps(record, first)

    def __enter__(self) -> TensorBoard:
        self._excepthook, threading.excepthook = threading.excepthook, _skip_writer_thread
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        # HParams has no status for a run that may be resumed; without one it shows "unknown".
        interrupted = kind is not None and issubclass(kind, RunInterrupted | KeyboardInterrupt)
        try:
            with self._naming_errors():
                try:
                    self._writer.close()
                finally:
                    threading.excepthook = self._excepthook
                if not interrupted and self._folder.exists():
                    status = api_pb2.STATUS_FAILURE if kind else api_pb2.STATUS_SUCCESS
                    _write_events(self._folder / STATUS, hparams.session_end(status))
        except DataError as error:
            if kind is None:
                raise
            log.warning("%s", error)  # the run has ended for another reason

    def add_epoch(self, record: EpochRecord) -> None:
        """Write an epoch's scalars, before its checkpoint is saved; `record` is the last one of the result."""
        step, ended_at, summary = record["epoch"] + 1, record["ended_at"], self._result.summary()
        with self._naming_errors():
            self._add_scalars(TAGS, record, step, ended_at)
            self._add_scalars({key: f"summary/{key}" for key in summary}, summary, step, ended_at)
            self._add_steps(record)
            self._writer.flush()

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
                image = draw()
            except Exception as error:  # not worth the run
                log.warning("images/%s could not be drawn: %s: %s", name, type(error).__name__, error)
                continue
            if image is not None:
                with self._naming_errors():
                    self._writer.add_image(f"images/{name}", np.asarray(image), epoch + 1, dataformats="HWC")
        with self._naming_errors():
            self._writer.flush()

    def _add_steps(self, record: EpochRecord, first: int = 1) -> None:
        for values in record["steps"]:
            if values["step"] + 1 >= first:
                self._add_scalars(STEP_TAGS, values, values["step"] + 1, record["ended_at"])

    def _add_scalars(self, tags: Mapping[str, str], values: Mapping[str, Any], step: int, wall_time: float) -> None:
        for name, tag in tags.items():
            if values.get(name) is not None:
                self._writer.add_scalar(tag, values[name], step, wall_time)

    @contextmanager
    def _naming_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DataError(f"cannot write TensorBoard's files in {self._folder}: {error.strerror}") from error


def _skip_writer_thread(arguments: threading.ExceptHookArgs) -> None:
    """Print no traceback for SummaryWriter's thread: its error is raised again in the main thread."""
    if not isinstance(arguments.thread, event_file_writer._AsyncWriterThread):
        threading.__excepthook__(arguments)


def _write_events(path: Path, *summaries: Summary) -> None:
    path.unlink(missing_ok=True)  # not truncated: TensorBoard may be reading it
    with path.open("wb") as file:
        writer = RecordWriter(file)
        for summary in summaries:
            writer.write(Event(wall_time=time.time(), summary=summary).SerializeToString())
