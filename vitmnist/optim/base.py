"""The registries of optimizers and learning-rate schedules: every module in this folder may register some."""

from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import Optimizer

from vitmnist.registry import Registry

OPTIMIZERS: Registry[Optimizer] = Registry("optimizer", __package__)
SCHEDULES: Registry[float] = Registry("schedule", __package__)
"""Functions of (options, step, steps of the run, steps of an epoch): the factor of the learning rate in a step.

Steps count from 0. A factor may not depend on those before, so that a resumed run may have another number of steps.
"""


def build_schedule(values: Mapping[str, Any], epochs: int, steps_per_epoch: int) -> Callable[[int], float]:
    """The factor of the learning rate as a function of the step; raises `ConfigError` as `Registry.member`."""
    factor, options = SCHEDULES.member(values)
    return lambda step: float(factor(options, step, epochs * steps_per_epoch, steps_per_epoch))
