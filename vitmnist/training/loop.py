"""The training loop and the evaluation loop."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from vitmnist.augment.preprocess import Preprocess
from vitmnist.loaders.base import Loader
from vitmnist.metrics import batch_metrics, confusion_metrics
from vitmnist.metrics.epoch_table import EVAL_S, SAVE_S, metric_name
from vitmnist.runtime.timer import EpochTimer
from vitmnist.runtime.world import SINGLE_PROCESS, World
from vitmnist.training.predictions import PredictionCollector, Predictions
from vitmnist.training.progress import EpochProgress, MetricAccumulator
from vitmnist.training.step import TrainStep

AfterStep = Callable[[EpochTimer], object]
"""Called after each batch, outside of the computing time: progress bar, checkpoint, signals."""


def train_epoch(
    step: TrainStep, loader: Loader, progress: EpochProgress, after_step: AfterStep = lambda timer: None
) -> dict[str, float]:
    """Train on the remaining batches of an epoch, one step per batch.

    Returns:
        The epoch's metrics by their names in `vitmnist.metrics.epoch_table`.

    Raises:
        DataError: the loader delivers too few batches.
        TrainingError: a loss is not finite; names the first such step.
    """
    metrics = progress.metrics
    step.train_mode()
    timer = progress.timer
    timer.start()  # This synchronises, so that the epoch is not charged for work that was queued before.
    for batch in timer.waiting(step.batches(loader, progress.epoch, start=metrics.steps)):
        sums = step(batch, progress.log_step)
        metrics.update(sums)
        timer.begin("other")
        after_step(timer)
    timer.stop()
    metrics.check_complete()
    return progress.compute()


def evaluate(
    model: nn.Module,
    loader: Loader,
    preprocess: Preprocess,
    after_step: AfterStep = lambda timer: None,
    world: World = SINGLE_PROCESS,
) -> tuple[dict[str, float], Predictions]:
    """Evaluate a model on the loader's epoch 0, in float32 and without augmentation.

    With several ranks, each evaluates a part, and all return the metrics and predictions of every image.

    Returns:
        The metrics by their names in `vitmnist.metrics.epoch_table`, and the predictions.

    Raises:
        DataError: the loader delivers too few batches.
    """
    model.eval()
    world.broadcast_buffers(model)  # The statistics of rank 0 are saved, so all ranks evaluate with them.
    sampler, device = loader.sampler, preprocess.mean.device
    metrics = MetricAccumulator(sampler, device, world)
    predictions = PredictionCollector(sampler, world)
    functions = batch_metrics()
    timer = EpochTimer(device)
    timer.start()
    with torch.inference_mode():
        for images, labels in timer.waiting(loader.epoch(0)):
            # If the last batch has no image for this rank, the rank gets an image of padding, and `valid` is 0.
            valid, size = sampler.num_valid(metrics.steps), sampler.num_images(metrics.steps)
            logits, targets = model(preprocess(images))[:valid], labels[:valid]
            loss = F.cross_entropy(logits, targets, reduction="sum") / size
            metrics.update({"loss": loss} | {name: compute(logits, targets) for name, compute in functions.items()})
            predictions.update(logits, targets)
            timer.begin("other")
            after_step(timer)
    timer.stop()
    metrics.check_complete()
    seconds = timer.seconds()
    saving = seconds.pop("saving")
    collected = predictions.compute()
    values = metrics.compute("eval")
    for name, value in confusion_metrics(collected.confusion_matrix(logits.shape[1])).items():
        values[metric_name("eval", name)] = value
    return {**values, EVAL_S.name: sum(seconds.values()), SAVE_S.name: saving}, collected
