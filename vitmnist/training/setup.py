"""Builds everything that training needs from the configuration: data, loaders, and the training step."""

from __future__ import annotations

import copy
import logging
import os
import random
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vitmnist.augment.preprocess import Preprocess, build_augment, input_size
from vitmnist.config.schema import Config, registries
from vitmnist.data.channel_statistics import configured_statistics
from vitmnist.data.datasets.base import DATASETS, Dataset, Split, build_dataset, prepare
from vitmnist.data.sampler import EpochSampler, RankSampler
from vitmnist.errors import ConfigError, DataError, PeerError, classify, described, first_line
from vitmnist.loaders.auto import AutoOptions, LoaderSelection, ResidentBatch, candidate_of, select_loader
from vitmnist.loaders.base import LOADERS, Loader, needs_of
from vitmnist.losses import LOSSES
from vitmnist.models import MODELS
from vitmnist.optim.ema import EMA
from vitmnist.optim.optimizers import OPTIMIZERS
from vitmnist.optim.schedules import build_schedule
from vitmnist.runtime.device import choose_device
from vitmnist.runtime.memory import Memory, check_fits, keep_freed_memory
from vitmnist.runtime.world import World
from vitmnist.timing.benchmark import Candidate
from vitmnist.training.fine_tuning import BATCH_NORMS, load_initial_weights, scale_learning_rates
from vitmnist.training.step import TrainStep, preserved_buffers
from vitmnist.training.step_options import StepConfig, resolve_step_config

log = logging.getLogger(__name__)


@dataclass
class TrainSetup:
    """What an epoch needs, on its device.

    Args:
        loader_values: the configuration of both loaders, with what `auto` chose.
        selection: the measurement behind `data/loader=auto`.
    """

    dataset: Dataset
    step: TrainStep
    train_loader: Loader
    eval_loader: Loader
    loader_values: Mapping[str, Any]
    selection: LoaderSelection | None = None


def build_setup(
    config: Config,
    device: torch.device,
    stack: ExitStack,
    world: World,
    step_config: StepConfig | None = None,
    weights: Mapping[str, Tensor] | None = None,
) -> TrainSetup:
    """Build everything that a configuration names.

    Args:
        stack: closes the loaders.
        world: the ranks that train together; each has its part of every batch.
        step_config: the options of the step, from a checkpoint; resolved from the configuration if None.
        weights: what `init` names; None leaves the model as it is built.

    Raises:
        ConfigError: something is unknown or does not fit together.
        DataError: the data cannot be read.
    """
    check_config(config, device)
    dataset = read_dataset(config, world)
    sampler = RankSampler.of(train_sampler(config, dataset), world.rank, world.size)
    if device.type == "cuda":
        use_deterministic_kernels()
    elif device.type == "cpu":
        keep_freed_memory()
    step_config = step_config or agree_on_step_config(config, sampler, device, world)
    if step_config.reasons:
        log.info("trainer options chosen for %s:\n%s", device, step_config.describe())
    step = build_step(config, dataset.train, sampler, device, step_config, weights)
    _check_batch_norm(config.model["name"], step, dataset.train, sampler, world)
    # Evaluation keeps no activations, so what fits in training fits here. All ranks take the size of rank 0: their own
    # may differ by one image.
    eval_batch = world.broadcast_object(lambda: step.microbatch_size) * world.size
    sets = [(dataset.train, sampler), (dataset.evaluated, split_sampler(dataset.evaluated, eval_batch, world))]
    values, selection = config.data.loader, None
    if isinstance(LOADERS.member(values)[1], AutoOptions):
        selection = select_run_loader(config, step, sets) if world.is_main else None
        values = world.broadcast_object(lambda: selection.values if selection else values)
    # All together, because the first loader may leave no room for the second.
    check_fits(values["name"], needs_of(values, sets, device) or Memory(), device, others=("ram", "cache", "disk"))
    train_loader, eval_loader = (stack.enter_context(LOADERS.build(values, *data, device)) for data in sets)
    train_loader.epochs = config.epochs  # the evaluation loader is only asked for epoch 0, again and again
    step.compile(train_loader)
    if step.compile_s:
        log.info("compilation took %.1f s, which no epoch includes", step.compile_s)
    world.connect(device, config.distributed.timeout_s)
    step.distribute(world)
    seed = config.seed + world.rank  # random layers such as dropout: ranks, which have different images, must differ
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    return TrainSetup(dataset, step, train_loader, eval_loader, values, selection)


def split_sampler(split: Split, batch_size: int, world: World) -> EpochSampler:
    """The sampler of an evaluation, of this rank: all images, in their order."""
    return RankSampler.of(EpochSampler(len(split), batch_size, 0, "none"), world.rank, world.size)


def use_deterministic_kernels() -> None:
    """Let a GPU add up in the same order each time, so that a resumed run repeats every bit.

    Otherwise the gradients of some convolutions do not, nor do those of attention once its keys take several blocks.
    Every operation of the models, losses, augmentations and optimizers has a deterministic implementation; another one
    raises `RuntimeError`. A warning instead (`warn_only`) would leave attention as it is.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at the first matrix product
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # saves kernels


def agree_on_step_config(config: Config, sampler: EpochSampler, device: torch.device, world: World) -> StepConfig:
    """The options of the step, resolved by rank 0 for all ranks."""
    sizes = min(sampler.batch_size, sampler.size), config.epochs * sampler.size
    resolved = world.broadcast_object(lambda: resolve_step_config(config.trainer, device, *sizes).to_dict())
    return StepConfig.from_dict(resolved)


def build_step(
    config: Config,
    split: Split,
    sampler: EpochSampler,
    device: torch.device,
    step_config: StepConfig,
    weights: Mapping[str, Tensor] | None,
) -> TrainStep:
    """Build model, optimizer, schedule, EMA, and the step that uses them."""
    _, channels, height, width = split.images.shape
    augment = build_augment(config.data.augment)
    size = input_size(augment, height, width)
    preprocess = Preprocess(split, augment).to(device)
    # Weights are initialised on the CPU, so they are identical on every device.
    torch.manual_seed(config.seed)
    model = MODELS.build(config.model, (channels, *size), len(split.classes))
    if weights is not None:
        load_initial_weights(model, weights, config.init_skip)
    optimizer = OPTIMIZERS.build(config.optimizer, model.to(device), step_config.fused)
    _check_outputs(config.model["name"], model, torch.zeros(2, channels, *size, device=device), len(split.classes))
    frozen_norms = scale_learning_rates(optimizer, model, config.lr_scale)
    schedule = build_schedule(config.schedule, config.epochs, len(sampler))
    return TrainStep(
        model,
        preprocess,
        optimizer,
        schedule,
        LOSSES.build(config.loss, split.labels, split.classes, device),
        batch_size=min(sampler.batch_size, sampler.size),
        config=step_config,
        clip_norm=config.trainer.clip_norm,
        ema=EMA(model, config.ema_decay) if config.ema_decay else None,
        frozen_norms=frozen_norms,
    )


def _check_outputs(name: str, model: nn.Module, images: Tensor, classes: int) -> None:
    """Raise `ConfigError` unless the model returns a logit per image and class: more of them would train silently."""
    try:
        with torch.no_grad():
            logits = model.eval()(images)  # in this mode, no state changes and no random number is drawn
    except Exception as error:  # of any type: the model's code
        if classify(error).is_user_error:
            raise
        raise ConfigError(
            f"model={name}: fails on images {list(images.shape[1:])}: {described(error).rstrip('.')}; set "
            "data.dataset.size or a crop in data.augment to a size that it takes, or choose another model"
        ) from error
    model.train()
    if not isinstance(logits, Tensor) or logits.shape != (len(images), classes):
        shown = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ConfigError(
            f"model={name}: it returned {shown} for {len(images)} images of {classes} classes; it must return logits "
            f"[{len(images)}, {classes}]"
        )


def _check_batch_norm(name: str, step: TrainStep, split: Split, sampler: EpochSampler, world: World) -> None:
    """Warn if batch normalisation sees microbatches; raise `ConfigError` if it would see one value per channel."""
    if not any(isinstance(module, BATCH_NORMS) and module.training for module in step.model.modules()):
        return
    if step.microbatch_size < min(sampler.batch_size, sampler.size):
        log.warning(
            "trainer.micro_batch=%d: the model has batch normalisation, whose statistics are those of a microbatch; "
            "trainer.micro_batch=null takes them from the whole batch",
            step.config.micro_batch,
        )
    if step.config.compile:  # compiled code gets full microbatches
        return
    sizes = (max(sampler.num_valid(batch), 1) for batch in (0, len(sampler) - 1))  # of a rank without images: padding
    is_single = [(size % step.microbatch_size or step.microbatch_size) == 1 for size in sizes]
    in_first, in_last = map(any, zip(*world.all_gather_object(is_single), strict=True))
    try:
        if in_first or in_last:
            with torch.no_grad(), preserved_buffers(step.model):  # the generators are seeded later
                step.model(step.preprocess(split.images[:1].to(step.device)))
    except ValueError as error:
        advice = "trainer.micro_batch=null, or a larger batch_size" if in_first else "data.drop_last=true"
        raise ConfigError(
            f"model={name}: a batch or microbatch has one image: {first_line(error)}; set {advice}"
        ) from error


def select_run_loader(config: Config, step: TrainStep, sets: Sequence[tuple[Split, EpochSampler]]) -> LoaderSelection:
    """Time the loaders with the run's own training step, then restore its state."""
    _, options = LOADERS.member(config.data.loader)
    assert isinstance(options, AutoOptions)
    train, *others = sets
    initial = copy.deepcopy(step.state_dict())

    # Before the timing, so that the memory of compiling does not count as memory that a loader must leave free.
    step.compile(ResidentBatch(*train, step.device))

    def timed(loader: Loader) -> Candidate:
        step.compile(loader)  # once more if the loader delivers floats
        return candidate_of(loader, step.device, step, lambda epoch: step.batches(loader, epoch))

    log.info("timing %s for a few batches each", ", ".join(options.candidates or ()) or "all loaders")
    try:
        selection, _ = select_loader(options, *train, step.device, timed=timed, also=others)
    finally:
        step.load_state_dict(initial)
        step.model.zero_grad()
    log.info("expected time per loader\n%s", selection.table())
    return selection


def train_sampler(config: Config, dataset: Dataset) -> EpochSampler:
    """The sampler of the global training batches; raises `ConfigError` if there is no batch."""
    data = config.data
    sampler = EpochSampler(len(dataset.train), config.batch_size, config.seed, data.shuffle, data.drop_last)
    if not len(sampler):
        raise ConfigError(
            f"batch_size={config.batch_size} exceeds the {sampler.size} training images, so data.drop_last=true leaves "
            f"no batch; type batch_size={sampler.size} or less, or data.drop_last=false"
        )
    return sampler


def check_config(config: Config, device: torch.device | str = "cpu") -> None:
    """Raise `ConfigError` for errors that the configuration alone shows, before data are read; tries the model too."""
    for key, registry in registries():
        registry.member(attrgetter(key)(config))
    augment = build_augment(config.data.augment)
    _, options = DATASETS.member(config.data.dataset)
    shape = getattr(options, "shape", None)
    configured_statistics(config.data.normalize, shape and shape[0])
    if shape:  # the number of classes is not known yet
        size = shape[0], *input_size(augment, *shape[1:])
        model = MODELS.build(config.model, size, 2).to(device)
        _check_outputs(config.model["name"], model, torch.zeros(2, *size, device=device), 2)


def agree_on_device(config: Config, world: World) -> torch.device:
    """This rank's device; all ranks have one of the same type.

    Raises:
        ConfigError: a rank has no device, or one of another type; the same error on each rank.
    """
    try:
        device, reason = choose_device(config.device, world), None
    except ConfigError as error:
        device, reason = torch.device("cpu"), str(error)
    ranks = world.all_gather_object((reason, device.type))
    for number, (reason, kind) in enumerate(ranks):
        if reason:
            raise ConfigError(reason)
        if kind != ranks[0][1]:
            raise ConfigError(
                f"device={config.device}: is {ranks[0][1]} on rank 0 and {kind} on rank {number}; name one"
            )
    if world.size > 1 and device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def read_dataset(config: Config, world: World) -> Dataset:
    """Read the dataset. On each machine the first rank downloads or decodes it, then the others read the files.

    Raises:
        ConfigError, DataError: it cannot be read or evaluated, or differs between machines.
    """
    if world.local_rank:
        world.barrier()
    dataset = build_dataset(config.data.dataset, config.data.root)
    if not world.local_rank:
        world.barrier()
    dataset = prepare(dataset, config.data)
    if dataset.eval_split == "train":
        raise ConfigError(f"{dataset.name}: has neither validation nor test images; type data.holdout=0.1")
    if config.patience and dataset.validation is None:
        raise ConfigError(
            f"patience={config.patience}: needs a validation split, or the test split would choose the epoch; type "
            "data.holdout=0.1 to hold out a tenth of the training images, or keep a folder val/ next to train/"
        )
    if world.size == 1:
        return dataset
    checksums = [sums for sums in world.all_gather_object(None if world.local_rank else dataset.sha256) if sums]
    if differing := [name for name in checksums[0] if len({sums[name] for sums in checksums}) > 1]:
        kind = DataError if world.is_main else PeerError  # all ranks find it at once, and rank 0 shows it for all
        raise kind(f"data.root={config.data.root}: {', '.join(differing)} differ between the machines")
    # The other ranks of a machine need not compute them again.
    splits: dict[str, Any] = {
        name: replace(split, sha256=checksums[0][f"{name}_images"]) for name, split in dataset.splits.items()
    }
    return replace(dataset, **splits)
