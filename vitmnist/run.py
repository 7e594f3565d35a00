"""One run, from its configuration to its records."""

from __future__ import annotations

import gc
import logging
import math
import os
import shlex
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from vitmnist.checkpoint import storage as checkpoint
from vitmnist.checkpoint.manager import CheckpointManager, saved_before
from vitmnist.config.labels import RESUMED, leaves, plain
from vitmnist.config.schema import Config
from vitmnist.config.validation import typed
from vitmnist.data.datasets import Dataset
from vitmnist.data.datasets.base import EVAL_FILES
from vitmnist.errors import ConfigError, DataError, PeerError, TrainingError
from vitmnist.report.runs import read_run
from vitmnist.runtime.device import choose_device
from vitmnist.runtime.distributed import ALONE, SingleProcess
from vitmnist.runtime.failures import classify, worker_error
from vitmnist.runtime.files import ClaimedError, claim, write_whole
from vitmnist.runtime.profiler import profiled
from vitmnist.runtime.signals import RunInterrupted, StopSignal
from vitmnist.runtime.timer import EpochTimer
from vitmnist.tracking.environment import describe_environment
from vitmnist.tracking.hardware import HardwareFigures
from vitmnist.tracking.progress import progress_bar
from vitmnist.tracking.result import EpochRecord, Result
from vitmnist.tracking.tensorboard import TensorBoard
from vitmnist.training import loop
from vitmnist.training.loop import TrainingPass
from vitmnist.training.metrics import Predictions
from vitmnist.training.setup import TrainSetup, build_setup

log = logging.getLogger(__name__)

NOTICEABLE = 10.0  # percent of the training time


def run(
    composed: DictConfig, folder: Path, overrides: list[str], stop: StopSignal, world: SingleProcess = ALONE
) -> Result:
    """Train and evaluate as configured, or go on with what `folder` holds, and leave the records there.

    Of several processes all call this; rank 0 keeps the records.

    Args:
        composed: the configuration, as `conf/` composes it.
        folder: an existing folder; gets `result.json`, a TensorBoard event file and checkpoints.
        overrides: what was typed, for the record.
        stop: tells when to stop before the end.
        world: with whom it is trained.

    Raises:
        ConfigError: the configuration cannot be used; nothing is recorded.
        DataError: the data cannot be used; nothing is recorded.
        TrainingError: training could not go on; recorded.
        PeerError: another process could not, before it began; nothing is recorded.
        Stopped: the run was told to stop; recorded and saved.
    """
    started = time.perf_counter()
    result = Result(overrides=overrides, choices=choices_of(composed))
    config = typed(Config, composed)
    result.config = plain(config)
    with ExitStack() as to_the_end:
        try:
            stop.after_minutes(config.max_minutes)
            with ExitStack() as stack:
                sitting = begin(config, folder, result, stop, stack, world)
                if sitting is None:
                    advise_further(result, config)
                    world.disconnect()
                    return result
                result.setup_s = time.perf_counter() - started - (result.compile_s or 0.0)
                to_the_end.enter_context(stop.deferred())  # a signal waits for a batch's end, or for the records
                learn(sitting, result, config, folder)
                advise(result)
            result.status = "completed"
        except BaseException as met:
            error = ended(world.root_cause(met), result, config, folder, stop, world)
            if error is met:
                raise
            raise error from met
        world.disconnect()
        write_result(result, folder, world)
    return result


def ended(
    error: BaseException, result: Result, config: Config, folder: Path, stop: StopSignal, world: SingleProcess
) -> BaseException:
    """Record why a run ended before its end, and let the other ranks know; what to raise for it."""
    refused = isinstance(error, ConfigError | DataError | PeerError)
    begun = result.setup_s is not None
    if stop.due and worker_error(error):
        error = stop.due  # whoever stopped the run stopped its workers too
    stopped = isinstance(error, RunInterrupted | KeyboardInterrupt)
    reason = classify(error).message
    if not stopped:
        world.report_failure(reason)
    elif begun:
        world.disconnect()
    if not begun and (refused or config.resume):  # there is nothing to record
        if world.is_main and not config.resume and not isinstance(error, ClaimedError):
            (folder / ".lock").unlink(missing_ok=True)
        return error
    result.status = "interrupted" if stopped else "failed"
    result.error = reason
    with stop.deferred():
        write_result(result, folder, world)
    return error


@dataclass
class RunContext:
    """A run that has been set up, from its beginning or from where it was saved."""

    setup: TrainSetup
    saved: CheckpointManager
    board: TensorBoard | None
    hardware: HardwareFigures
    device: torch.device
    current: TrainingPass | None
    """The epoch that was under way when it was saved."""
    world: SingleProcess


def begin(
    config: Config, folder: Path, result: Result, stop: StopSignal, stack: ExitStack, world: SingleProcess
) -> RunContext | None:
    """Set a run up, and note in `result` what is known of it; the stack closes what must be closed.

    None where the run has completed all its epochs; nothing of its records is touched then.

    Raises:
        ConfigError: something of the configuration is unknown, does not fit together, or may not change on resuming.
        DataError: the data or the checkpoints cannot be read.
    """
    gc.collect()  # a compiled step of the job before is a cycle, which would take this one's memory
    device = meet(config, world)
    result.batch_size, result.seed, result.device = config.batch_size, config.seed, str(device)
    if world.is_main:
        stack.enter_context(claim(folder))
    kept = saved_before(config, folder, world) if config.resume else None
    if kept:
        result.epochs = kept["records"]
        is_completed = world.broadcast_object(lambda: read_run(folder).status == "completed")
        if len(result.epochs) == config.epochs and is_completed:
            return None
    # What was decided for another kind of device, another part of a batch, or from other wishes, is decided anew.
    same = kept and kept["typed"] == (device.type, world.size, plain(config)["trainer"])
    setup = build_setup(config, device, stack, world, kept["trainer"] if kept and same else None)
    hardware = HardwareFigures(device)  # after an automatic choice, whose candidates' memory is not this run's
    if setup.choice:
        result.choices |= setup.choice.built
        result.auto = setup.choice.record()
    result.dataset = world.broadcast_object(lambda: describe_dataset(setup.dataset))
    result.environment = describe_environment(device) if world.is_main else None
    if world.size > 1:
        result.distributed = {"ranks": world.size}
    saved = CheckpointManager(folder, config, setup, result, stop, world)
    current = saved.restore(kept) if kept else None
    setup.learner.capture(setup.step, setup.train_loader)
    saved.note_step()
    if config.resume and world.is_main:
        write_whole(folder / RESUMED, OmegaConf.to_yaml(result.overrides).encode())
        # They were of a run that had ended, which it has not any more.
        (folder / "result.json").unlink(missing_ok=True)
        if len(result.epochs) < config.epochs:
            (folder / checkpoint.FOLDER / "final.safetensors").unlink(missing_ok=True)
    log.info(
        "%s (%s parameters) on %s, %s loader, %s batches of %d%s, device=%s is %s",
        result.choices["model"],
        f"{sum(parameter.numel() for parameter in setup.step.model.parameters()):,}",
        setup.dataset.name,
        result.choices["loader"],
        f"{len(setup.train_loader):,}",
        config.batch_size,
        f", divided among {world.size} processes" if world.size > 1 else "",
        config.device,
        device,
    )
    log.info("evaluated on the %s", setup.dataset.evaluated_on())
    if world.is_main and (files := setup.dataset.test.files):
        write_whole(folder / EVAL_FILES, b"".join(os.fsencode(f"{file}\n") for file in files))
    board = stack.enter_context(TensorBoard(folder, result)) if world.is_main else None
    return RunContext(setup, saved, board, hardware, device, current, world)


def meet(config: Config, world: SingleProcess) -> torch.device:
    """Connect the ranks, and see that they want the same; this rank's device.

    Raises:
        ConfigError: a rank has another configuration, or no device; the same on each rank.
    """
    try:
        device, reason = choose_device(config.device, world), None
    except ConfigError as error:
        device, reason = torch.device("cpu"), str(error)
    hellos = world.all_gather_object({"config": leaves(plain(config)), "device": device.type, "reason": reason})
    first = hellos[0]
    for rank, hello in enumerate(hellos):
        if hello["reason"]:
            raise ConfigError(hello["reason"])
        differing = [
            f"{key}={hello['config'].get(key)} (rank 0: {first['config'].get(key)})"
            for key in sorted(first["config"] | hello["config"])
            # As text: NaN is not equal to itself.
            if str(hello["config"].get(key)) != str(first["config"].get(key)) and key != "data.root"
        ]
        if hello["device"] != first["device"]:
            differing.append(f"device is {hello['device']} (rank 0: {first['device']})")
        if differing:
            raise ConfigError(f"rank {rank} was started differently: {', '.join(differing)}; type the same for each")
    world.connect(device, config.distributed.timeout_s)
    return device


def learn(sitting: RunContext, result: Result, config: Config, folder: Path) -> None:
    """Train and evaluate until all epochs are done, each recorded and saved.

    Raises:
        TrainingError: training could not go on.
        Stopped: the run was told to stop, and is saved.
    """
    setup, saved, device, current = sitting.setup, sitting.saved, sitting.device, sitting.current
    world = sitting.world
    steps, options = len(setup.train_loader), config.tensorboard
    first = len(result.epochs)
    for epoch in range(first, config.epochs):
        last = epoch + 1 == config.epochs
        current = current or TrainingPass(epoch, steps, device, options.every_steps, world)
        profiling = config.profile and epoch == first and world.is_main
        recording = profiled(folder, steps - current.tally.steps, device) if profiling else nullcontext()
        record, predictions = train_and_evaluate(sitting, current, recording)
        current = None
        saved.note_step()
        result.epochs.append(record)
        # Before the checkpoint: what is drawn of an epoch that it does not know is left out on resuming.
        if sitting.board and options.images_every_epochs and (last or (epoch + 1) % options.images_every_epochs == 0):
            sitting.board.pictures(setup, predictions, epoch)
        saved.after_epoch(last)
        if sitting.board:
            sitting.board.epoch(record)
        log_epoch(record, config.epochs)
        if not last:
            saved.stop_between_epochs()
    saved.final_weights()


def write_result(result: Result, folder: Path, world: SingleProcess) -> None:
    """Write `result.json`, on rank 0.

    Raises:
        TrainingError: it cannot be written; says what it would have said.
    """
    if not world.is_main:
        return
    try:
        result.write(folder)
    except OSError as error:
        reason = f"; the run {result.status}: {result.error}" if result.error else ""
        raise TrainingError(f"cannot write {folder / 'result.json'}: {error.strerror}{reason}") from error


def choices_of(composed: DictConfig) -> dict[str, str]:
    """The registered name that each config group came down to: `{"model": "vit", "loader": "ram", …}`."""
    places = ("model", "data.dataset", "data.loader", "data.loader.base", "data.augment", "optimizer", "schedule")
    plain = OmegaConf.to_container(composed)
    names = {}
    for place in places:
        node: Any = plain
        for key in (*place.split("."), "name"):  # a refused configuration may lack any of it
            node = node.get(key) if isinstance(node, dict) else None
        if node is not None:
            names[place.removeprefix("data.")] = str(node)
    return names


def train_and_evaluate(
    sitting: RunContext, current: TrainingPass, recording: AbstractContextManager[Callable[[], None] | None]
) -> tuple[EpochRecord, Predictions]:
    """One epoch of training, or what is left of it, and the evaluation after it.

    Args:
        recording: entered for the training; what it yields, if anything, is called after each step.

    Raises:
        TrainingError: a loss was not finite.
        Stopped: the run was told to stop, and is saved.
    """
    setup, saved, device, hardware = sitting.setup, sitting.saved, sitting.device, sitting.hardware
    started = time.time()
    epoch, steps = current.epoch, len(setup.train_loader)

    def advance(timer: EpochTimer) -> None:
        bar.update()
        if record_step:
            record_step()
        saved.after_step(current, timer)

    try:
        shown = sitting.world.is_main
        with (
            progress_bar(f"epoch {epoch + 1} train", steps, current.tally.steps, shown) as bar,
            recording as record_step,
        ):
            train = loop.train_epoch(setup.step, setup.train_loader, current, device, advance)
        record_step = None
        with progress_bar(f"epoch {epoch + 1} {setup.dataset.eval_split}", len(setup.test_loader), shown=shown) as bar:
            val, predictions = loop.evaluate(
                setup.step.evaluated, setup.test_loader, setup.test_preprocess, device, advance, sitting.world
            )
        if not math.isfinite(val.loss):
            rate = setup.step.rate
            raise TrainingError(
                f"the validation loss is {val.loss} after epoch {epoch + 1}, step {steps}, at learning rate {rate:g}; "
                "try a smaller optimizer.lr"
            )
    except TrainingError as error:
        raise TrainingError(f"{error}{saved.good()}") from error
    memory = hardware.host_peak_mib(), hardware.gpu_peak_mib()
    return EpochRecord.of(epoch, train, val, *memory, hardware.gpu_util_pct(started), current.watched()), predictions


def log_epoch(record: EpochRecord, epochs: int) -> None:
    """A line for people; epochs count from 1 there and from 0 in the records."""
    log.info(
        "epoch %d/%d  train loss %.4f acc %.2f%%  val loss %.4f acc %.2f%%  "
        "%.2f s, %.1f%% of training waiting for data, %s images/s",
        record.epoch + 1,
        epochs,
        record.train_loss,
        record.train_acc,
        record.eval_loss,
        record.eval_acc,
        record.epoch_s,
        record.data_wait_pct,
        f"{record.images_per_s:,.0f}",
    )


def advise(result: Result) -> None:
    """Say so if another loader could make the run noticeably shorter."""
    waiting = result.summary()["data_wait_pct"] or 0.0
    if waiting > NOTICEABLE and result.auto is None:
        log.info(
            "%.0f%% of the training time was spent waiting for data; data/loader=auto measures which loader helps",
            waiting,
        )


def advise_further(result: Result, config: Config) -> None:
    """Say that a completed run has nothing left to do, and how to train it further."""
    log_epoch(result.epochs[-1], config.epochs)
    log.info(
        "all %d epochs are done, nothing is left to do; train further with\n    python train.py %s epochs=N",
        config.epochs,
        shlex.quote(f"resume={config.resume}"),
    )


def describe_dataset(dataset: Dataset) -> dict[str, Any]:
    """Name, sizes and checksums, for the record."""
    return {
        "name": dataset.name,
        "train_size": len(dataset.train),
        "test_size": len(dataset.test),
        "skipped": dataset.skipped,
        "sha256": dataset.sha256(),
    }
