"""Makes small training steps, and compares trained ones."""

import torch
from torch import nn

from vitmnist.augment.preprocess import Compose, Preprocess
from vitmnist.data.datasets.base import Dataset
from vitmnist.data.sampler import EpochSampler
from vitmnist.loaders.base import LOADERS, Loader
from vitmnist.losses import LOSSES
from vitmnist.models.vit import ViT, ViTOptions
from vitmnist.optim.optimizers import EMA, OPTIMIZERS
from vitmnist.optim.schedules import build_schedule
from vitmnist.training.loop import train_epoch
from vitmnist.training.model_runner import ModelRunner
from vitmnist.training.progress import EpochProgress
from vitmnist.training.step import TrainStep
from vitmnist.training.step_options import StepOptions

CPU = torch.device("cpu")
SHIFT = Compose([{"name": "shift", "pixels": 2}])
MIXUP, CUTMIX = (Compose([{"name": "shift", "pixels": 2}, {"name": name}]) for name in ("mixup", "cutmix"))
BATCH = 8  # The 23 images make two full batches and a batch of 7.
OPTIMIZERS_UNDER_TEST = {
    "adam": {"lr": 0.003},
    "adamw": {"lr": 0.003, "weight_decay": 0.1},
    "sgd": {"lr": 0.1, "weight_decay": 0.01, "nesterov": True},
}


def make_vit(depth: int = 2) -> ViT:
    torch.manual_seed(0)
    return ViT(ViTOptions(patch_size=14, dim=16, depth=depth, heads=2, head_dim=8, mlp_dim=16), (1, 28, 28), 10)


def make_step(
    data: Dataset,
    optimizer: str = "adamw",
    *,
    model: nn.Module | None = None,
    augment: Compose | None = SHIFT,
    decay: float | None = None,
    smoothing: float = 0.0,
    device: torch.device = CPU,
    steps: int = 9,
    clip_norm: float | None = None,
    **options: object,
) -> TrainStep:
    """Build a step with a one-cycle schedule."""
    config = StepOptions(**{"fused": True, "micro_batch": 4, **options})
    model = (model or make_vit()).to(device)
    built = OPTIMIZERS.build({"name": optimizer, **OPTIMIZERS_UNDER_TEST.get(optimizer, {})}, model, config.fused)
    values = {"name": "cross_entropy", "label_smoothing": smoothing}
    loss = LOSSES.build(values, data.train.labels, data.train.classes, device)
    runner = ModelRunner(model, Preprocess(data.train, augment).to(device), loss, BATCH, config)
    schedule = build_schedule({"name": "one_cycle"}, 1, steps)
    return TrainStep(runner, built, schedule, clip_norm, EMA(model, decay) if decay else None)


def make_loader(data: Dataset, name: str, device: torch.device = CPU) -> Loader:
    return LOADERS.build({"name": name}, data.train, EpochSampler(23, BATCH, 3), device)


def train(step: TrainStep, loader: Loader, epochs: int = 3, first: int = 0) -> list[dict[str, float]]:
    return [
        train_epoch(step, loader, EpochProgress(epoch, loader.sampler, step.device, log_every=2))
        for epoch in range(first, first + epochs)
    ]


def gradient_difference(ours: nn.Module, theirs: nn.Module) -> float:
    """The norm of the difference of the gradients, relative to the norm of the second."""
    pairs = [(mine.grad, other.grad) for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True)]
    difference = torch.cat([(mine - other).flatten() for mine, other in pairs]).norm()
    return float(difference / torch.cat([other.flatten() for _, other in pairs]).norm())


def check_same_weights(ours: nn.Module, theirs: nn.Module, tolerance: float = 1e-4) -> None:
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)
