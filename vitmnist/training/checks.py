"""Checks that the parts of a run fit together, before it trains."""

import copy
import math
from collections.abc import Mapping
from functools import partial
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitmnist.augment.preprocess import build_augment
from vitmnist.config.schema import Config, iterate_registries
from vitmnist.data.channel_statistics import resolve_statistics
from vitmnist.data.datasets.base import DATASETS, Dataset, Split
from vitmnist.data.sampler import EpochSampler
from vitmnist.errors import ConfigError, DataError, PeerError, as_data_error, classify_error, first_line
from vitmnist.losses import LOSSES
from vitmnist.metrics import BatchMetricInfo, MetricCollection
from vitmnist.optim.schedules import SCHEDULES
from vitmnist.runtime.random_state import preserve_random_state
from vitmnist.runtime.world import World
from vitmnist.training.batch import PADDING_LABEL
from vitmnist.training.build import build_model
from vitmnist.training.step import TrainStep


def check_config(config: Config, device: torch.device) -> None:
    """Raise `ConfigError` for values that are unknown or do not fit together, before the data is read.

    The model is built if the size of the images is known by then.
    """
    for key, registry in iterate_registries():
        registry.resolve(attrgetter(key)(config))
    build_augment(config.data)
    _, options = DATASETS.resolve(config.data.dataset)
    resolve_statistics(config.data.normalize, options.shape and options.shape[0])
    if options.shape:  # The number of classes is unknown before the data is read; use two.
        build_model(config, options.shape, num_classes=2, device=device, weights=None)


def check_eval_split(dataset: Dataset, config: Config) -> None:
    """Raise `ConfigError` if there is no split to evaluate the epochs on, or none that may choose an epoch."""
    if dataset.eval_split_name == "train":
        advice = "data.fold=0" if dataset.folds else "data.holdout=0.1"
        raise ConfigError(f"{dataset.name}: has neither validation nor test images; set {advice}")
    key = f"patience={config.patience}" if config.patience else f"schedule={config.schedule['name']}"
    _, schedule = SCHEDULES.resolve(config.schedule)
    if (config.patience or schedule.follows_monitor) and dataset.validation is None:
        raise ConfigError(
            f"{key}: needs a validation split, or the test split would choose the epoch; set "
            "data.holdout=0.1 to hold out a tenth of the training images, or keep a folder val/ next to train/"
        )


def check_same_on_machines(dataset: Dataset, config: Config, world: World) -> None:
    """Raise an error on each rank if the dataset differs between the machines."""
    checksums = [sums for sums in world.all_gather_object(None if world.local_rank else dataset.sha256) if sums]
    if differing := [name for name in checksums[0] if len({sums[name] for sums in checksums}) > 1]:
        kind = DataError if world.is_main else PeerError  # Every rank finds the difference; only rank 0 shows it.
        raise kind(f"data.root={config.data.root}: {', '.join(differing)} differ between the machines")


def check_loss(values: Mapping[str, Any], train: Split, has_mixing: bool) -> None:
    """Raise `ConfigError` for a loss that padding changes, or that has parameters to train."""

    # On a GPU, indexing with a label of -100 would end the process.
    build_loss = partial(LOSSES.build, values, train.labels, train.classes, torch.device("cpu"))

    def compute(logits: Tensor, targets: Tensor) -> Tensor:
        with preserve_random_state():  # A loss may draw random numbers or have a state.
            return build_loss()(logits, targets)

    loss = build_loss()
    if isinstance(loss, nn.Module) and any(parameter.requires_grad for parameter in loss.parameters()):
        raise ConfigError(f"loss={values['name']}: has parameters, and the optimizer trains only those of the model")
    num_classes = len(train.classes)
    logits, labels = torch.arange(4.0 * num_classes).sin().view(4, num_classes), torch.arange(3) % num_classes
    cases = [(labels, torch.tensor([PADDING_LABEL]), f"the label {PADDING_LABEL}")]
    if has_mixing:
        probabilities = F.one_hot(labels, num_classes) * 0.7 + 0.3 / num_classes
        cases.append((probabilities, torch.zeros(1, num_classes), "a row of zeros as its target"))
    for targets, padding, name in cases:
        expected = compute(logits[:3], targets)
        try:
            padded, alone = compute(logits, torch.cat([targets, padding])), compute(logits[3:], padding)
            # The mean of two copies of a batch is that of one. A loss may be random, so compare roughly.
            is_sum = bool(compute(logits[:3].repeat(2, 1), torch.cat([targets] * 2)) >= 1.5 * expected)
            fits, reason = is_sum and torch.allclose(padded, expected, rtol=1e-4) and not alone, ""
        except (IndexError, RuntimeError) as error:
            if classify_error(error).is_user_error:  # For example, an operation without a deterministic implementation
                raise
            fits, reason = False, f" ({first_line(error)})"
        if not fits:
            raise ConfigError(
                f"loss={values['name']}: must be a sum over the images to which an image with {name}, which pads a "
                f"batch, adds 0{reason}"
            )


def check_metric_functions(metrics: MetricCollection, num_classes: int) -> None:
    """Try the metrics; raise `ConfigError` for one of a batch that is not a sum: a mean would be divided twice."""
    classes = torch.eye(num_classes)
    metrics.compute(classes.long(), classes, torch.arange(num_classes))
    labels = torch.arange(7) % num_classes
    predictions = (labels + torch.arange(7) // 3) % num_classes  # The first three are right.
    logits = F.one_hot(predictions, num_classes).float()
    labels[6] = PADDING_LABEL
    for name, compute in metrics.of_kind(BatchMetricInfo).items():
        with as_data_error(f"metrics: {name}"):
            whole, *parts = (compute(logits[rows], labels[rows]) for rows in (slice(7), slice(2), slice(2, 6)))
        if whole.dim() or not math.isclose(float(whole), float(sum(parts)), rel_tol=1e-4, abs_tol=1e-4):
            raise ConfigError(
                f"metrics: {name} must return the sum over the images of a batch whose labels are not negative, as a "
                f"scalar tensor; it returned {whole.tolist()} for six images and padding"
            )


def check_weight_average(step: TrainStep) -> None:
    """Raise `ConfigError` if the optimizer averages the weights, as schedulefree does, and the run cannot use that."""
    if hasattr(step.optimizer, "eval") and (step.ema or step.runner.has_batch_norm):
        raise ConfigError("optimizer: averages the weights itself; set ema_decay=null, and a model without batch norm")


def check_batch_norm(step: TrainStep, image: Tensor, sampler: EpochSampler) -> None:
    """Raise the `ValueError` of batch normalisation now if it cannot train on a last microbatch of one image."""
    # The last batch of an epoch can be shorter. A rank without images receives one image of padding.
    sizes = [max(sampler.num_rank_images(batch), 1) for batch in (0, len(sampler) - 1)]
    runner = step.runner
    if runner.has_batch_norm and any((size - 1) % runner.microbatch_size == 0 for size in sizes):
        with torch.no_grad():
            copy.deepcopy(step.model)(step.preprocess(image))  # `seed_rank` seeds the generators later.
