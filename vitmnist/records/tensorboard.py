"""A run's figures as TensorBoard scalars; the step is the epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from vitmnist.records.result import EpochRecord, Result

TAGS = {
    "train_loss": "train/loss",
    "train_acc": "train/acc",
    "val_loss": "val/loss",
    "val_acc": "val/acc",
    "epoch_s": "time/epoch_s",
    "train_s": "time/train_s",
    "eval_s": "time/eval_s",
    "data_wait_s": "time/data_wait_s",
    "compute_s": "time/compute_s",
    "data_wait_pct": "time/data_wait_pct",
    "images_per_s": "throughput/images_per_s",
    "host_peak_mib": "memory/host_mib",
    "gpu_peak_mib": "memory/gpu_mib",
    "gpu_util_pct": "gpu/util_pct",
}


class TensorBoard:
    """One event file for one run.

    A run that is resumed may have written epochs that its checkpoint does not know, and will come by them again. So its
    file is written anew from the records: no step stands in it twice, and none is missing.
    """

    def __init__(self, folder: Path, records: Sequence[EpochRecord] = ()) -> None:
        for earlier in folder.glob("events.out.tfevents.*"):
            earlier.unlink()
        self._writer = SummaryWriter(str(folder))
        for record in records:
            self.epoch(record)

    def epoch(self, record: EpochRecord) -> None:
        """Write an epoch's scalars and hand them to the file, so that a running TensorBoard shows them."""
        figures = asdict(record) | {"data_wait_pct": record.data_wait_pct}
        for name, tag in TAGS.items():
            if figures[name] is not None:
                self._writer.add_scalar(tag, figures[name], record.epoch, record.ended_at)
        self._writer.flush()

    def summary(self, result: Result) -> None:
        """Write the run's summary at its last epoch."""
        for name, value in result.summary().items():
            self._writer.add_scalar(f"summary/{name}", value, result.epochs[-1].epoch)

    def close(self) -> None:
        """Hand everything to the file and close it."""
        self._writer.close()
