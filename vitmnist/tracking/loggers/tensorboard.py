"""Writes a run to TensorBoard: metrics of epochs and steps, images, the configuration, and its row in HParams."""

from __future__ import annotations

import io
import json
import logging
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import RecordWriter
from torch.utils.tensorboard.summary import hparams, image, text

from vitmnist.config.schema import SEEDS, affects_nothing, keys_where
from vitmnist.config.values import flatten, is_under, value_text
from vitmnist.registry import NoOptions
from vitmnist.runtime.files import append
from vitmnist.tracking.epoch_record import EpochRecord
from vitmnist.tracking.loggers import LOGGERS, Logger, epoch_scalars, step_scalars
from vitmnist.tracking.result import Result

log = logging.getLogger(__name__)

# TensorBoard reads the event files of a folder in the order of their names; the time of the start follows EVENTS.
CONFIG, EVENTS = "config.tfevents", "events.out.tfevents"

HPARAMS = ("data/loader", "batch_size", "model", "optimizer.lr", "trainer", "epochs")
"""Every run has these columns in HParams, next to its overridden keys."""


@LOGGERS.register("tensorboard")
class TensorBoard(Logger):
    """The event files of one run; a context manager. HParams shows success if the block ended without an exception.

    Epochs and steps count from 1 here, as in the log, and from 0 in the records. Events are written when they are
    added, without `SummaryWriter`, whose thread prints a traceback if it cannot write.

    Raises:
        OSError: a file cannot be written; the methods raise it too.
    """

    def __init__(self, options: NoOptions, folder: Path, result: Result) -> None:
        self._result, self._config = result, folder / CONFIG
        # TensorBoard keeps the first configuration that it reads of a run, so a resumed run replaces it. In this folder
        # the row in HParams is the run's; torch's `add_hparams` would add a second run for it. The description of
        # the experiment is not written: TensorBoard then makes it of all runs, and opens with the keys that differ.
        _, start, self._success = hparams(hyperparameters(result), {})
        config = text("config", f"```yaml\n{yaml.safe_dump(result.config, sort_keys=False)}```")
        self._config.unlink(missing_ok=True)  # not truncated: TensorBoard may be reading it
        _append(self._config, *(_event(summary) for summary in (start, config)))
        # Hide what an interrupted run wrote after its last checkpoint. TensorBoard drops all tags from this step on, so
        # the `step/…` tags, which count faster than epochs, are written again from the records.
        self._path, first = folder / f"{EVENTS}.{time.time_ns()}", len(result.epochs) + 1
        version = Event(wall_time=time.time(), step=first, file_version="brain.Event:2")
        start_of_session = Event(wall_time=time.time(), step=first, session_log=SessionLog(status=SessionLog.START))
        again = [event for record in result.epochs for event in _steps(record, first)]
        _append(self._path, version, start_of_session, *again)

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        summary = {f"summary/{key}": value for key, value in self._result.summary().items() if value is not None}
        try:
            _append(self._path, *_scalars(summary, len(self._result.epochs), time.time()))
            if kind is None:
                _append(self._config, _event(self._success))
        except OSError as error:
            if kind is None:
                raise
            log.warning("%s: cannot be written: %s", error.filename, error.strerror)  # the run failed before

    def add_epoch(self, record: EpochRecord) -> None:
        _append(self._path, *_scalars(epoch_scalars(record), record["epoch"] + 1, record["ended_at"]), *_steps(record))

    def add_images(self, images: Mapping[str, Image.Image], epoch: int) -> None:
        for name, drawn in images.items():
            summary = image(f"images/{name}", np.asarray(drawn), dataformats="HWC")
            _append(self._path, _event(summary, epoch + 1))


def hyperparameters(result: Result) -> dict[str, Any]:
    """The row of a run in HParams: numbers and texts by their keys on the command line."""
    values = flatten(result.config or {})
    skipped = (*keys_where(affects_nothing), *SEEDS, "hydra", "experiment", "hparams_search")
    overridden = [override.lstrip("+~").partition("=")[0] for override in result.overrides]
    row = {}
    for key in (*HPARAMS, *(key for key in overridden if not is_under(key, skipped))):
        section = key.rpartition("@")[2].replace("/", ".")
        value = values.get(section, values.get(f"{section}.name"))
        if isinstance(value, float):
            value = float(value_text(value))  # the dashboard would show its last digits
        # torch would leave out None, and turn a boolean into a number.
        row[key] = json.dumps(value) if value is None or isinstance(value, bool | list) else value
    return row


def _steps(record: EpochRecord, first: int = 1) -> Iterator[Event]:
    """The logged steps of an epoch from step `first` on."""
    for values in record["steps"]:
        if values["step"] + 1 >= first:
            yield from _scalars(step_scalars(values), values["step"] + 1, record["ended_at"])


def _scalars(values: Mapping[str, float], step: int, wall_time: float) -> Iterator[Event]:
    """An event for each value, so that a torn file loses few."""
    for tag, value in values.items():
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
        yield Event(wall_time=wall_time, step=step, summary=summary)


def _event(summary: Summary, step: int = 0) -> Event:
    return Event(wall_time=time.time(), step=step, summary=summary)


def _append(path: Path, *events: Event) -> None:
    content = io.BytesIO()
    writer = RecordWriter(content)
    for event in events:
        writer.write(event.SerializeToString())
    append(path, content.getvalue())
