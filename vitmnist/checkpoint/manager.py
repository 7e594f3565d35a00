"""What of a run is saved, and when; and how the run goes on with it."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save as to_safetensors

from vitmnist.checkpoint import storage as checkpoint
from vitmnist.checkpoint.rng import random_state, set_random_state, set_torch_state, torch_state
from vitmnist.config.labels import is_under, leaves, plain
from vitmnist.config.schema import Config
from vitmnist.errors import ConfigError, DataError, TrainingError
from vitmnist.runtime.distributed import SingleProcess
from vitmnist.runtime.files import write_whole
from vitmnist.runtime.signals import RunInterrupted, StopSignal
from vitmnist.runtime.timer import EpochTimer
from vitmnist.tracking.result import Result
from vitmnist.training.fast import StepConfig
from vitmnist.training.loop import TrainingPass
from vitmnist.training.setup import TrainSetup

log = logging.getLogger(__name__)

FREE = (
    *("epochs", "data.loader", "data.root", "data.dataset.path", "device", "checkpoint", "max_minutes", "resume"),
    *("repeats", "repeat", "sweep", "tensorboard", "profile", "trainer", "distributed"),
)
"""The keys that may change when a run is resumed; all others decide what is learnt."""


class CheckpointManager:
    """The checkpoints of a run under way.

    Rank 0 writes them for all. They do not depend on the number of ranks: each has the same weights, and the figures of
    an epoch are added up.
    """

    def __init__(
        self, folder: Path, config: Config, setup: TrainSetup, result: Result, stop: StopSignal, world: SingleProcess
    ) -> None:
        self._world = world
        self._stopping: RunInterrupted | None = None
        self._folder, self._trainee, self._result, self._stop = folder, setup, result, stop
        self._config = plain(config)
        self._options, self._has_holdout = config.checkpoint, config.data.holdout is not None
        self._watch_every = config.tensorboard.every_steps
        self.note_step()
        self._saved_at, self._steps_since = time.monotonic(), 0
        self._good: int | None = None  # the epochs that are done in the newest checkpoint
        train = setup.dataset.train
        self._facts = json.dumps(
            {
                "config": self._config,
                "shape": list(train.images.shape[1:]),
                "classes": train.classes,
                "mean": train.mean,
                "std": train.std,
            }
        )

    def restore(self, kept: Mapping[str, Any]) -> TrainingPass | None:
        """Put the run where a checkpoint left it; the pass that was under way, if one was.

        Raises:
            DataError: the data set is another one, or the checkpoint is not of our making.
        """
        try:
            return self._restore(kept)
        except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise _not_ours(self._folder, error) from error

    def _restore(self, kept: Mapping[str, Any]) -> TrainingPass | None:
        dataset = self._result.dataset or {}
        if kept["dataset"] != dataset["sha256"]:
            differing = ", ".join(
                name for name, value in dataset["sha256"].items() if kept["dataset"].get(name) != value
            )
            raise DataError(f"the data set is not the one that the run began with: {differing} differ")
        setup = self._trainee
        step = setup.step
        step.model.load_state_dict(kept["model"])
        # How the optimizer computes is this sitting's matter, and decides where torch puts its state.
        for group, built in zip(kept["optimizer"]["param_groups"], step.optimizer.param_groups, strict=True):
            group.update({key: built[key] for key in ("fused", "foreach", "capturable") if key in built})
        step.optimizer.load_state_dict(kept["optimizer"])
        step.schedule.load_state_dict(kept["schedule"])
        if step.average:
            step.average.load_state_dict(kept["average"])
        if self._world.is_main:
            set_random_state(kept["random"])
        elif self._world.rank <= len(kept.get("random_of_others", [])):  # a new rank begins with a seed of its own
            set_torch_state(kept["random_of_others"][self._world.rank - 1], step.gradient.device)
        self._good = len(kept["records"])
        current = None
        if kept["pass"]:
            device = next(step.model.parameters()).device
            current = TrainingPass(self._good, len(setup.train_loader), device, self._watch_every, self._world)
            current.load_state_dict(kept["pass"])
        done = current.tally.steps if current else 0
        log.info("resumed after %d epochs and %d batches", self._good, done)
        return current

    def note_step(self) -> None:
        """Put into the record how steps are computed; running out of memory may have changed it."""
        self._result.trainer = self._trainee.learner.record()
        self._result.compile_s = self._trainee.learner.gradient.compile_s or None

    def after_step(self, current: TrainingPass, timer: EpochTimer) -> None:
        """Save within an epoch if it is time to, or if the run is to stop; raises `Stopped` then.

        Args:
            timer: of the pass under way, training or evaluation, which is charged for saving.
        """
        minutes = self._options.every_minutes
        stopping, time_to_save = self._world.all_reduce_max(
            [self._wish_to_stop(), minutes is not None and time.monotonic() - self._saved_at >= 60 * minutes]
        )
        self._steps_since += 1
        if self._world.size > 1 and self._steps_since == 1:  # this vote was cast before the save
            time_to_save = 0
        if stopping or time_to_save:
            timer.begin("saving")
            current.tally.check_finite(current.epoch)  # what is broken is not kept
            self._save(current)
            timer.begin("other")
        if stopping:
            self._world.barrier()  # while rank 0 writes: torchrun ends the others when one has ended
            raise self._stop.agree(stopping - 1)

    def after_epoch(self, last: bool) -> None:
        """Save after an epoch that is recorded, if it is time to."""
        accuracies = [record["eval_acc"] for record in self._result.epochs]
        # Selected by the test split, its accuracy there would be biased.
        best = self._has_holdout and accuracies[-1] > max(accuracies[:-1], default=-1.0)
        every = self._options.every_epochs
        stopping, _ = self._world.all_reduce_max([self._wish_to_stop(), 0], at_once=True)
        if last or best or stopping or (every and len(accuracies) % every == 0):
            self._save(None, best)
        self._stopping = self._stop.agree(stopping - 1) if stopping else None

    def stop_between_epochs(self) -> None:
        """Raise `Stopped` if, after the last epoch, the run was to stop."""
        if self._stopping:
            self._world.barrier()
            raise self._stopping

    def _wish_to_stop(self) -> int:
        """0 for none; else the exit code, and 1."""
        return 1 + self._stop.due.exit_code if self._stop.due else 0

    def final_weights(self) -> None:
        """Write `final.safetensors`, with what is needed to use them.

        Raises:
            DataError: it cannot be written.
        """
        if not self._world.is_main:
            return
        weights = {name: value.contiguous().cpu() for name, value in self._trainee.step.evaluated.state_dict().items()}
        path = self._folder / checkpoint.FOLDER / "final.safetensors"
        try:
            write_whole(path, to_safetensors(weights, {"vitmnist": self._facts}))
        except OSError as error:
            raise DataError(f"cannot write {path}: {error.strerror}") from error

    def good(self) -> str:
        """The end of a message about training that went wrong: where the last good checkpoint is."""
        if self._good is None:
            return ""
        path = self._folder / checkpoint.FOLDER / "last.pt"
        return f"; {path} is from before it, after epoch {self._good}"

    def _save(self, current: TrainingPass | None, best: bool = False) -> None:
        step = self._trainee.step
        self.note_step()
        if not all(bool(value.isfinite().all()) for value in step.model.parameters()):
            raise TrainingError("the weights are not finite any more; try a smaller optimizer.lr")
        _, *others = self._world.all_gather_tensors(torch_state(step.gradient.device))
        state = {
            "facts": self._facts,
            "dataset": (self._result.dataset or {})["sha256"],
            "records": self._result.epochs,
            "pass": current.state_dict() if current else None,
            "trainer": self._result.trainer,
            "device": step.gradient.device.type,
            "ranks": self._world.size,
            "model": step.model.state_dict(),
            "average": step.average.state_dict() if step.average else None,
            "optimizer": step.optimizer.state_dict(),
            "schedule": step.schedule.state_dict(),
            "random": random_state(),
            "random_of_others": others,
        }
        if self._world.is_main:
            checkpoint.save(self._folder, state, best)
        self._saved_at, self._steps_since = time.monotonic(), 0
        self._good = len(self._result.epochs)


def saved_before(config: Config, folder: Path, world: SingleProcess) -> dict[str, Any] | None:
    """The checkpoint that a run is resumed from, its records as such; None where it was stopped before its first.

    Rank 0 reads it for all.

    Raises:
        ConfigError: the folder is not that of the run, or the configuration is not, or fewer epochs are asked for than
            are done.
        DataError: the checkpoint cannot be read.
    """
    if Path(str(config.resume)).expanduser().resolve() != folder.resolve():
        raise ConfigError(f"resume={config.resume}: its name cannot be typed for Hydra; rename the folder")
    kept = world.broadcast_tensors(lambda: checkpoint.load(folder))
    if kept is None:
        if (folder / "result.json").exists():
            raise ConfigError(f"resume={config.resume}: holds records, but no checkpoint to go on from")
        return None
    try:
        check_same(json.loads(kept["facts"])["config"], plain(config))
        kept["trainer"] = StepConfig.recorded(kept["trainer"])
        kept["typed"] = kept["device"], kept["ranks"], json.loads(kept["facts"])["config"]["trainer"]
        done = len(kept["records"]) + bool(kept["pass"])
    except (KeyError, TypeError, ValueError) as error:
        raise _not_ours(folder, error) from error
    if config.epochs < done:
        raise ConfigError(f"epochs={config.epochs}: the run has begun its epoch {done}; type epochs={done} or more")
    return kept


def _not_ours(folder: Path, error: Exception) -> DataError:
    """The error for a checkpoint that is whole, and yet not what this program writes."""
    return DataError(f"{folder / checkpoint.FOLDER}: not a checkpoint of this version of the program: {error}")


def check_same(before: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse to resume with a configuration that learns something else.

    Raises:
        ConfigError: names each key that differs and may not.
    """
    old, new = leaves(before), leaves(now)
    changed = [
        f"{key}={new.get(key)} (it was {old.get(key)})"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and not is_under(key, FREE)
    ]
    if changed:
        raise ConfigError(
            f"resume: the run began with another configuration: {', '.join(changed)}; only {', '.join(FREE)} may change"
        )
