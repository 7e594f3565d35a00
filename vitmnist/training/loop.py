"""The training loop, and the evaluation loop with its predictions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitmnist.augment.preprocess import Preprocess
from vitmnist.data.sampler import EpochSampler
from vitmnist.loaders.base import Loader
from vitmnist.metrics import BatchMetricInfo, MetricCollection, ProbabilityMetricInfo
from vitmnist.runtime.device import set_float32_precision
from vitmnist.runtime.timer import EpochTimer
from vitmnist.runtime.world import SINGLE_PROCESS, World
from vitmnist.training.batch import load_batches
from vitmnist.training.progress import EpochProgress, MetricAccumulator
from vitmnist.training.step import TrainStep

log = logging.getLogger(__name__)

AfterStep = Callable[[EpochTimer], object]
"""Called after each batch for the progress bar, checkpoints and signals. Its time does not count as computing."""


def train_epoch(
    step: TrainStep, loader: Loader, progress: EpochProgress, after_step: AfterStep = lambda timer: None
) -> dict[str, Any]:
    """Train on the remaining batches of an epoch, and return its metrics, named as in `epoch_table`.

    Raises:
        ValueError: the loader delivers fewer or more batches than the epoch has.
        TrainingError: a loss is not finite; the message names the first such step.
    """
    timer = progress.timer
    if progress.num_batches < len(loader):  # A run that was stopped in the evaluation resumes in evaluation mode.
        step.train_mode()
    timer.start()  # It synchronises first, so work queued earlier does not count towards this epoch.
    for batch in timer.waiting(step.batches(loader, progress.epoch, start=progress.num_batches)):
        sums = step.forward_backward(batch)
        progress.record_step(step, sums)  # It reads the gradients before `update` clips them.
        step.update()
        timer.begin("other")
        after_step(timer)
    timer.stop()
    step.eval_mode()
    if skipped_steps := step.pop_skipped_steps():
        log.info("trainer.precision=fp16: %d steps overflowed, and were skipped", skipped_steps)
    return progress.compute()


def evaluate(
    model: nn.Module,
    loader: Loader,
    preprocess: Preprocess,
    after_step: AfterStep = lambda timer: None,
    world: World = SINGLE_PROCESS,
    split: str = "eval",
    metrics: MetricCollection | None = None,
) -> EvalPass:
    """Evaluate a model on the loader's epoch 0, in float32 and without augmentation.

    `eval_loss` is always the cross-entropy, so that runs with different losses can be compared. Each rank evaluates its
    part of the images. Every rank returns the metrics and the predictions for all images.

    Args:
        split: the prefix of the metrics, such as `SPLIT_loss`. `SPLIT_s` is the time of the evaluation in seconds.
        metrics: the metrics to compute; None: all registered metrics.

    Raises:
        ValueError: the loader delivers fewer or more batches than the epoch has.
    """
    model.eval()
    world.broadcast_buffers(model)  # The statistics of rank 0 are saved, so all ranks evaluate with them.
    sampler, device = loader.sampler, preprocess.mean.device
    metrics = metrics or MetricCollection()
    accumulator = MetricAccumulator(sampler, device, world)
    batches: list[Predictions] = []
    functions, keeps_probabilities = metrics.of_kind(BatchMetricInfo), bool(metrics.of_kind(ProbabilityMetricInfo))
    timer = EpochTimer(device)
    timer.start()
    with torch.inference_mode(), set_float32_precision():
        for batch in timer.waiting(load_batches(loader, epoch=0)):
            logits, labels = model(preprocess(batch.images)), batch.labels
            cross_entropy = F.cross_entropy(logits, labels, reduction="sum")
            accumulator.update({"loss": cross_entropy, **{name: fn(logits, labels) for name, fn in functions.items()}})
            probabilities = logits.softmax(dim=1)
            kept = probabilities if keeps_probabilities else None
            batches.append(Predictions(logits.argmax(dim=1), probabilities.amax(dim=1), labels, logits.shape[1], kept))
            timer.begin("other")
            after_step(timer)
    timer.stop()
    seconds = timer.seconds()
    save_s = seconds.pop("saving")
    predictions = gather_predictions(batches, sampler, world)
    values = {
        **accumulator.compute(),
        **metrics.compute(predictions.confusion_matrix(), predictions.probabilities, predictions.labels),
        "s": sum(seconds.values()),
    }
    return EvalPass({f"{split}_{name}": value for name, value in values.items()}, predictions, save_s)


@dataclass(frozen=True)
class EvalPass:
    """The metrics of an evaluation, named as in `epoch_table`, and the seconds in which checkpoints were saved."""

    metrics: dict[str, Any]
    predictions: Predictions
    save_s: float


@dataclass(frozen=True)
class Predictions:
    """Predicted class and softmax confidence per image, in split order, on the device."""

    predicted: Tensor  # The most likely class, int64 `[N]`
    confidence: Tensor  # Its softmax probability, float `[N]`
    labels: Tensor  # The true class, int64 `[N]`
    num_classes: int
    probabilities: Tensor | None = None  # Float `[N, num_classes]`, if a metric needs them

    def confusion_matrix(self) -> Tensor:
        """Count the images by true class (rows) and predicted class (columns): int64 `[classes, classes]`, CPU."""
        pairs = self.labels * self.num_classes + self.predicted
        return torch.bincount(pairs, minlength=self.num_classes**2).view(self.num_classes, self.num_classes).cpu()

    def mistakes(self) -> list[int]:
        """Return the indices of the misclassified images, the most confident first."""
        wrong = (self.predicted != self.labels).nonzero().flatten()
        order = self.confidence[wrong].argsort(descending=True, stable=True)
        indices: list[int] = wrong[order].tolist()
        return indices


def gather_predictions(batches: Sequence[Predictions], sampler: EpochSampler, world: World) -> Predictions:
    """Gather the predictions of all ranks from the batches of each rank; every rank must call this."""

    # Padding comes last. Without repetitions, sample IDs are indices.
    count = sum(map(sampler.num_rank_images, range(len(sampler))))

    def gather(name: str) -> Tensor:
        values = torch.cat([getattr(batch, name) for batch in batches])[:count]
        indices = sampler.sample_ids(0, device=values.device)[:count]
        zeros = values.new_zeros(sampler.size, *values.shape[1:])
        return world.all_reduce_sum(zeros.index_copy_(0, indices, values))

    predicted, confidence, labels = map(gather, ("predicted", "confidence", "labels"))
    probabilities = None if batches[0].probabilities is None else gather("probabilities")
    return Predictions(predicted, confidence, labels, batches[0].num_classes, probabilities)
