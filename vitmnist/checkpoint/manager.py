"""Saves and restores the checkpoints of a run."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

from vitmnist.augment.preprocess import get_input_size
from vitmnist.checkpoint import storage
from vitmnist.checkpoint.storage import Checkpoint
from vitmnist.config.schema import Config, fill_defaults, find_changeable_keys, to_json_values
from vitmnist.data.datasets.base import Dataset, Split
from vitmnist.errors import DataError, TrainingError
from vitmnist.runtime.random_state import RandomState
from vitmnist.runtime.signals import StopReason, StopSignal, create_interruption
from vitmnist.runtime.timer import EpochTimer
from vitmnist.runtime.world import World
from vitmnist.tracking.result import Result
from vitmnist.tracking.resume import check_resumable
from vitmnist.training.progress import EpochProgress
from vitmnist.training.step import TrainStep

log = logging.getLogger(__name__)


@dataclass(eq=False)
class CheckpointManager:
    """Saves and restores the checkpoints of a run; rank 0 writes them for all ranks.

    A checkpoint does not depend on the number of ranks: all ranks have the same weights, and their sums are combined.
    Within an epoch, its logged steps are sent to the loggers with each checkpoint.
    """

    config: Config
    dataset: Dataset
    step: TrainStep
    result: Result
    stop: StopSignal
    world: World
    send_steps: Callable[[Sequence[Mapping[str, Any]]], None]

    def __post_init__(self) -> None:
        self._model_info = make_model_info(self.config, self.dataset.train)
        self._checksums: dict[str, str] = self.world.broadcast_object(lambda: self.dataset.sha256)
        self._saved_at = time.monotonic()

    def save(self, progress: EpochProgress | None, is_best: bool = False) -> None:
        """Write a checkpoint; `progress` is None between epochs."""
        step = self.step
        finite = [parameter.isfinite().all() for parameter in step.model.parameters()]
        if not torch.stack(finite).all():  # One wait for the GPU, not one for each parameter.
            raise TrainingError("the weights are no longer finite; try a smaller optimizer.lr")
        checkpoint: Checkpoint = {
            "format": storage.FORMAT,
            "config": to_json_values(self.config),
            "model_info": self._model_info,
            "dataset_sha256": self._checksums,
            "step": step.state_dict(),
            "epochs": self.result.epochs,
            "is_best": is_best,
            "rng": self.world.all_gather_object(RandomState(device=step.device).to_dict()),
            "threads": torch.get_num_threads(),
            "progress": progress.state_dict() if progress else None,
        }
        if self.world.is_main:
            storage.write_checkpoint(self.result.folder, checkpoint)
        self._saved_at = time.monotonic()

    def restore(self, checkpoint: Checkpoint, progress: EpochProgress) -> None:
        """Restore the run and the progress of its epoch; raises `DataError` if dataset or checkpoint do not fit."""
        with storage.as_damaged_error(self.result.folder / storage.FOLDER / storage.WEIGHT_FILES["last"]):
            saved = checkpoint["dataset_sha256"]
            if differing := [name for name, value in self._checksums.items() if saved.get(name) != value]:
                raise DataError(f"the dataset has changed since the run began: {', '.join(differing)} differ")
            self.step.load_state_dict(checkpoint["step"])
            if checkpoint["progress"]:
                progress.load_state_dict(checkpoint["progress"])
            # Ranks added since the checkpoint keep the seed of `seed_rank`.
            if self.world.rank < len(checkpoint["rng"]):
                RandomState(device=self.step.device).load_dict(checkpoint["rng"][self.world.rank])
        if checkpoint.get("is_best") and self.world.is_main:  # The run may have been killed before it wrote `best.pt`.
            storage.write_checkpoint(self.result.folder, checkpoint)
        before, now = checkpoint.get("threads"), torch.get_num_threads()
        if before and before != now and self.step.device.type == "cpu":
            log.warning("torch had %d threads and has %d now; the results will differ by rounding", before, now)
        log.info("resumed after %d epochs and %d batches", len(checkpoint["epochs"]), progress.num_batches)

    def save_or_stop_in_epoch(self, progress: EpochProgress, timer: EpochTimer) -> None:
        """Save within an epoch if due; if the run is to stop, save and raise `RunInterrupted`.

        Args:
            timer: the timer of the current pass, training or evaluation.
        """
        minutes = self.config.checkpoint.every_minutes
        is_due = minutes is not None and time.monotonic() - self._saved_at >= 60 * minutes
        stopping, saving = self.world.max_over_ranks([self.stop.reason, is_due])
        if stopping or saving:
            timer.begin("saving")
            progress.check_finite()
            self.save(progress)
            self.send_steps(progress.logged_steps())
            timer.begin("other")
        if stopping:
            self._interrupt(stopping)

    def save_or_stop_after_epoch(self, is_last: bool, is_best: bool, must_save: bool = False) -> None:
        """Save after an epoch that is in `result`, if due; if the run is to stop, save and raise `RunInterrupted`.

        Args:
            is_best: also write `best.pt`.
            must_save: save even if it is not due.
        """
        interval = self.config.checkpoint.min_interval_s
        is_due = interval is not None and time.monotonic() - self._saved_at >= interval
        stopping, saving = self.world.max_over_ranks([self.stop.reason, is_due or must_save])
        if is_last or is_best or stopping or saving:
            self.save(None, is_best)
        if stopping and not is_last:
            self._interrupt(stopping)

    def check_stop(self, timer: EpochTimer) -> None:
        """If the run is to stop, raise `RunInterrupted` without saving; a resumed run repeats the pass of `timer`."""
        if stopping := self.world.max_over_ranks([self.stop.reason])[0]:
            self._interrupt(stopping)

    def _interrupt(self, stopping: int) -> NoReturn:
        """End the run on all ranks."""
        # Rank 0 may still be writing, and torchrun kills all ranks when one exits.
        self.world.barrier()
        raise create_interruption(StopReason(stopping))

    def load_best_weights(self, epoch: int | None) -> None:
        """Load the weights of the best epoch, saved with a validation split, into the evaluated model."""
        read = partial(storage.read_best_weights, self.result.folder, epoch)
        self.step.evaluated_model.load_state_dict(self.world.broadcast_object(read))

    def save_final_weights(self) -> None:
        """Write `final.safetensors` with its `model_info`; raises `OSError`."""
        if self.world.is_main:
            storage.write_final_weights(self.result.folder, self.step.evaluated_model.state_dict(), self._model_info)


def read_checkpoint_to_resume(config: Config, folder: Path, world: World) -> Checkpoint | None:
    """Read the checkpoint to resume from, on rank 0 for all ranks. Returns None if there is no checkpoint.

    Raises:
        ConfigError: the configuration does not fit the checkpoint; see `check_resumable`.
        DataError: the checkpoint cannot be read.
    """
    checkpoint = world.broadcast_object(lambda: storage.read_newest_checkpoint(folder))
    if checkpoint is not None:
        started_epochs = len(checkpoint["epochs"]) + bool(checkpoint["progress"])
        check_resumable(fill_defaults(checkpoint["config"]), config, started_epochs)
    return checkpoint


def make_model_info(config: Config, train: Split) -> dict[str, Any]:
    """Return the metadata of the weights, plain values: how to build the model, and how to read files for it."""
    changeable = find_changeable_keys(config)
    return {
        "model": config.model,
        "shape": tuple(train.images.shape[1:]),
        "classes": train.classes,
        "mean": train.mean,
        "std": train.std,
        "size": get_input_size(config.data, *train.images.shape[2:]),
        "dataset": {
            key: value for key, value in config.data.dataset.items() if f"data.dataset.{key}" not in changeable
        },
    }
