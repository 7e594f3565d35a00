"""The learning-rate schedules: the factor of the learning rate in each training step."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vitmnist.config.validation import config_field
from vitmnist.errors import ConfigError
from vitmnist.registry import NoOptions, OptionsClass, Registry

SCHEDULES: Registry[OptionsClass, float] = Registry("schedule", __package__)
"""Functions of (options, step, steps of the run, steps of an epoch) that return the factor of the learning rate.

Steps count from 0. The factor depends only on these arguments, so that a resumed run can have more epochs.
"""


def build_schedule(values: Mapping[str, Any], epochs: int, steps_per_epoch: int) -> Callable[[int], float]:
    """Return a function from a step to the learning-rate factor; raises `ConfigError` if the options do not fit."""
    compute_factor, options = SCHEDULES.resolve(values)
    total_steps = epochs * steps_per_epoch

    def factor(step: int) -> float:
        # `data/loader=auto` can time more steps than the run has. They use the last factor.
        return float(compute_factor(options, min(step, total_steps - 1), total_steps, steps_per_epoch))

    factor(0)  # Raise now if the options do not fit.
    return factor


@dataclass
class OneCycleOptions:
    """See `conf/schedule/one_cycle.yaml`."""

    warmup: float = config_field(0.3, above=0, below=1)
    start_factor: float = config_field(0.04, above=0, at_most=1)
    end_factor: float = config_field(1e-4, above=0, at_most=1)


@dataclass
class CosineOptions:
    """See `conf/schedule/cosine.yaml`."""

    warmup_epochs: float = config_field(0.0, at_least=0)
    final_factor: float = config_field(0.0, at_least=0, at_most=1)


@SCHEDULES.register("constant")
def constant(options: NoOptions, step: int, total_steps: int, steps_per_epoch: int) -> float:
    """Constant learning rate, as in the articles."""
    return 1.0


@SCHEDULES.register("cosine", CosineOptions)
def cosine(options: CosineOptions, step: int, total_steps: int, steps_per_epoch: int) -> float:
    """Linear warm-up and cosine decay (Loshchilov, Hutter, arXiv:1608.03983; Goyal et al., arXiv:1706.02677).

    As in torch's `CosineAnnealingLR` with `T_max` steps of decay, the curve would reach `final_factor` one step after
    the last step, so that no step has a learning rate of 0.

    Raises:
        ConfigError: no step is left for the decay.
    """
    warmup = options.warmup_epochs * steps_per_epoch
    if warmup >= total_steps:
        raise ConfigError(
            f"schedule.warmup_epochs={options.warmup_epochs:g}: must be below epochs={total_steps // steps_per_epoch}"
        )
    if step < warmup:
        return (step + 1) / (warmup + 1)  # A first step at 0 would train nothing.
    return _cosine(1.0, options.final_factor, (step - warmup) / (total_steps - warmup))


@SCHEDULES.register("one_cycle", OneCycleOptions)
def one_cycle(options: OneCycleOptions, step: int, total_steps: int, steps_per_epoch: int) -> float:
    """Cosine warm-up to the optimizer's learning rate and cosine decay (Smith, Topin, arXiv:1708.07120).

    The curve would reach `end_factor` one step after the last step. torch's `OneCycleLR` reaches it in the last step,
    and divides by zero if the warm-up is a single step.
    """
    warmup = options.warmup * total_steps
    if step < warmup:
        return _cosine(options.start_factor, 1.0, step / warmup)
    return _cosine(1.0, options.end_factor, (step - warmup) / (total_steps - warmup))


def _cosine(begin: float, end: float, progress: float) -> float:
    return end + (begin - end) * (1 + math.cos(math.pi * progress)) / 2
