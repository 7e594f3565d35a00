"""The registries of optimizers and learning-rate schedules: every module in this folder may register some."""

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from vitmnist.registry import Registry

OPTIMIZERS: Registry[Optimizer] = Registry("optimizer", __package__)
SCHEDULES: Registry[LRScheduler] = Registry("schedule", __package__)
