"""What an epoch needs."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from vitmnist.data.datasets import Dataset
from vitmnist.data.loaders import Loader
from vitmnist.data.loaders.auto import Choice
from vitmnist.data.preprocess import Preprocess


@dataclass(frozen=True)
class Trainee:
    """What an epoch needs, built and on its device."""

    dataset: Dataset
    model: nn.Module
    train_loader: Loader
    test_loader: Loader
    train_preprocess: Preprocess
    test_preprocess: Preprocess
    optimizer: Optimizer
    schedule: LRScheduler
    choice: Choice | None
