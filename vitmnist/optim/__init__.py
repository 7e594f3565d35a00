"""The optimizers and learning-rate schedules: every module in this folder that registers one is imported here."""

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from vitmnist.registry import Registry, import_members

__all__ = ["OPTIMIZERS", "SCHEDULES"]

OPTIMIZERS: Registry[Optimizer] = Registry("optimizer")
SCHEDULES: Registry[LRScheduler] = Registry("schedule")

import_members(__name__, __path__)
