"""A run as TensorBoard shows it: figures of epochs and of steps, pictures, its configuration, its row in HParams."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.plugins.hparams import api_pb2
from torch.utils.tensorboard import SummaryWriter

from vitmnist.runtime.signals import RunInterrupted
from vitmnist.tracking import hparams
from vitmnist.tracking.images import confusion, training_batch, worst_mistakes
from vitmnist.tracking.result import EpochRecord, Result
from vitmnist.training.metrics import Predictions
from vitmnist.training.setup import TrainSetup

TAGS = {
    "train_loss": "train/loss",
    "train_acc": "train/acc",
    "eval_loss": "eval/loss",
    "eval_acc": "eval/acc",
    "epoch_s": "time/epoch_s",
    "train_s": "time/train_s",
    "eval_s": "time/eval_s",
    "save_s": "time/save_s",
    "data_wait_s": "time/data_wait_s",
    "compute_s": "time/compute_s",
    "data_wait_pct": "time/data_wait_pct",
    "images_per_s": "throughput/images_per_s",
    "host_peak_mib": "memory/host_mib",
    "gpu_peak_mib": "memory/gpu_mib",
    "gpu_util_pct": "gpu/util_pct",
}
STEP_TAGS = {"loss": "step/loss", "lr": "step/lr", "grad_norm": "step/grad_norm"}

# Charts that put all runs beside each other, in the dashboard "custom scalars".
LAYOUT = {
    "What an epoch takes": {
        "seconds of an epoch": ["Multiline", ["time/epoch_s"]],
        "seconds waiting for data": ["Multiline", ["time/data_wait_s"]],
        "training images a second": ["Multiline", ["throughput/images_per_s"]],
    },
    "What is learnt": {
        "accuracy, %": ["Multiline", ["eval/acc"]],
        "loss": ["Multiline", ["train/loss", "eval/loss"]],
    },
}


class TensorBoard:
    """One event file for one run; a context manager, which tells how the run ended.

    A run that is resumed may have written epochs that its checkpoint does not know, and will come by them again. So its
    file is written anew, from the records and the pictures of the epochs that are done: no step stands in it twice, and
    none is missing.
    """

    def __init__(self, folder: Path, result: Result) -> None:
        earlier = sorted(folder.glob("events.out.tfevents.*"))
        self._folder, self._result = folder, result
        self._writer = SummaryWriter(str(folder))
        self._file = self._writer._get_file_writer()
        self._writer.add_text("config", f"```yaml\n{yaml.safe_dump(result.config, sort_keys=False)}```")
        self._writer.add_custom_scalars(LAYOUT)
        for summary in hparams.begun(result):
            self._file.add_summary(summary)
        for event in _pictures(earlier, len(result.epochs)):
            self._file.add_event(event, event.step, event.wall_time)
        for record in result.epochs:
            self.epoch(record)
        for file in earlier:
            file.unlink()

    def __enter__(self) -> TensorBoard:
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        if self._folder.exists():  # the writer's thread would tell its own story of a folder that was removed
            self._ending(kind)
        self._writer.close()

    def _ending(self, kind: type[BaseException] | None) -> None:
        if self._result.epochs:
            for name, value in self._result.summary().items():
                if value is not None:
                    self._writer.add_scalar(f"summary/{name}", value, self._result.epochs[-1].epoch + 1)
        if kind is None:
            status = api_pb2.STATUS_SUCCESS
        elif issubclass(kind, RunInterrupted | KeyboardInterrupt):
            status = api_pb2.STATUS_UNKNOWN  # HParams has no word for a run that may go on
        else:
            status = api_pb2.STATUS_FAILURE
        self._file.add_summary(hparams.ended(status))

    def epoch(self, record: EpochRecord) -> None:
        """Write an epoch's scalars and hand them to the file, so that a running TensorBoard shows them.

        Epochs count from 1 in TensorBoard, as in the log, and from 0 in the records.
        """
        figures = asdict(record) | {"data_wait_pct": record.data_wait_pct}
        self._scalars(TAGS, figures, record.epoch + 1, record.ended_at)
        for step in record.steps:
            self._scalars(STEP_TAGS, asdict(step), step.step, record.ended_at)
        self._writer.flush()

    def _scalars(self, tags: dict[str, str], figures: dict[str, Any], step: int, time: float) -> None:
        for name, tag in tags.items():
            if figures[name] is not None:
                self._writer.add_scalar(tag, figures[name], step, time)

    def pictures(self, setup: TrainSetup, predictions: Predictions, epoch: int) -> None:
        """Write what the model was fed in an epoch, and what it got wrong after it."""
        batch = training_batch(setup.dataset.train, setup.train_loader, setup.step.gradient.preprocess, epoch)
        self._writer.add_image("images/training_batch", batch, epoch + 1)
        mistakes = worst_mistakes(setup.dataset.test, predictions)
        if mistakes is not None:
            self._writer.add_figure("images/worst_mistakes", mistakes, epoch + 1)
        self._writer.add_figure("images/confusion_matrix", confusion(setup.dataset.test, predictions), epoch + 1)
        self._writer.flush()


def _pictures(files: Sequence[Path], epochs: int) -> Iterator[Event]:
    """The pictures of the first `epochs` epochs, each once; a file that is cut off ends where it is cut."""
    found: dict[tuple[str, int], Event] = {}
    for file in files:
        for content in RawEventFileLoader(str(file)).Load():
            event = Event.FromString(content)
            for value in event.summary.value:
                if event.step <= epochs and value.HasField("image"):
                    found[value.tag, event.step] = event
    yield from found.values()
