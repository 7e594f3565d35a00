"""Writes a run to TensorBoard: metrics of epochs and steps, images, the configuration and the hyperparameters."""

import io
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import RecordWriter
from torch.utils.tensorboard.summary import hparams, image, text

from vitmnist.config import is_under
from vitmnist.config.schema import IGNORED_KEYS, flatten_keys
from vitmnist.metrics.epoch_record import EpochRecord
from vitmnist.registry import NoOptions
from vitmnist.runtime.files import attach_filename, read_json_or_yaml
from vitmnist.tracking.loggers import LOGGERS, Logger, get_epoch_scalars, get_run_scalars, get_step_scalars
from vitmnist.tracking.result import Result

EVENTS = "events.out.tfevents"
"""The prefix of the names of event files, before the time: TensorBoard reads files in the order of their names."""


@LOGGERS.register("tensorboard")
class TensorBoard(Logger):
    """Writes the event file of one start of a run.

    TensorBoard counts epochs and steps from 1, as the log does. Events are written at once: the thread of a
    `SummaryWriter` would print a traceback if it could not write.

    Raises:
        OSError: a file cannot be written; the methods raise it too.
    """

    def __init__(self, options: NoOptions, folder: Path, result: Result) -> None:
        self._path, first = folder / f"{EVENTS}.{time.time_ns()}", len(result.epochs) + 1
        self._result = result
        version = Event(wall_time=time.time(), step=first, file_version="brain.Event:2")
        # At this event, TensorBoard drops all values from step `first` on: epochs that an interrupted run logged after
        # its last checkpoint, and many values of `train_step/…`, because steps outnumber epochs. Those are written
        # again.
        start = Event(wall_time=time.time(), step=first, session_log=SessionLog(status=SessionLog.START))
        overrides, config = "\n".join(result.overrides), yaml.safe_dump(result.config, sort_keys=False)
        texts = _event(text("config", f"Overrides:\n```\n{overrides}\n```\nAll keys:\n```yaml\n{config}```"), first)
        self._append(version, start, texts, _event(_hyperparameters(result), first))
        self.add_steps([step for record in result.epochs for step in record["steps"] if step["step"] + 1 >= first])

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if scalars := get_run_scalars(self._result):
            self._append(*self._scalars(scalars, len(self._result.epochs), time.time()))

    def add_steps(self, steps: Sequence[Mapping[str, Any]]) -> None:
        events = (self._scalars(get_step_scalars(values), values["step"] + 1, time.time()) for values in steps)
        self._append(*chain.from_iterable(events))

    def add_epoch(self, record: EpochRecord) -> None:
        values = get_epoch_scalars(record, self._result)
        self._append(*self._scalars(values, record["epoch"] + 1, record["ended_at"]))

    def add_images(self, images: Mapping[str, Image.Image], epoch: int) -> None:
        for name, picture in images.items():
            self._append(_event(image(f"visuals/{name}", np.asarray(picture), dataformats="HWC"), epoch + 1))

    def _scalars(self, values: Mapping[str, float], step: int, wall_time: float) -> Iterator[Event]:
        """Yield an event for each value, so that a truncated file loses few values."""
        for tag, value in values.items():
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
            yield Event(wall_time=wall_time, step=step, summary=summary)

    def _append(self, *events: Event) -> None:
        content = io.BytesIO()
        writer = RecordWriter(content)
        for event in events:
            writer.write(event.SerializeToString())
        with attach_filename(self._path), self._path.open("ab") as file:
            file.write(content.getvalue())


def _hyperparameters(result: Result) -> Summary:
    """Return the seed and the overridden keys, in a sweep only those that vary. HParams finds the metrics itself.

    Keys that affect neither the result nor the timing are left out, and so are lists.
    """
    record = result.folder.parent / "multirun.yaml"
    sweep: Any = read_json_or_yaml(record) if record.exists() else None
    varied = [text for text in result.overrides if not sweep or text not in sweep["hydra"]["overrides"]["task"]]
    overridden = [text.partition("=")[0].lstrip("+").replace("/", ".") for text in varied]
    values: dict[str, float | str] = {}
    for key, value in flatten_keys(result.config or {}).items():
        name = key.removesuffix(".name")  # The member of a group, as it is set on the command line
        if name in ("seed", *overridden) and not is_under(key, IGNORED_KEYS) and not isinstance(value, list):
            # HParams shows the seed 1 as 1.0000 if it is a number.
            values[name] = value if type(value) in (int, float) and "seed" not in key else str(value)
    # HParams would read a list of keys (`experiment`) of the first run alone, and miss the keys of others.
    return hparams(values, {})[1]


def _event(summary: Summary, step: int) -> Event:
    return Event(wall_time=time.time(), step=step, summary=summary)
