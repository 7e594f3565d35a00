"""The learning-rate schedules, built with (options, optimizer, total steps) and stepped once per training step.

The learning rate must be a function of the step alone, as with `LambdaLR`: a resumed run may have another number of
steps, and torch's schedulers that compute a rate from the one before it would continue the old curve.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ConstantLR, LambdaLR, LRScheduler

from vitmnist.config.validation import bounded
from vitmnist.optim.base import SCHEDULES
from vitmnist.registry import NoOptions


@dataclass
class OneCycleOptions:
    """See `conf/schedule/one_cycle.yaml`."""

    warmup: float = bounded(0.3, above=0, below=1)
    start_factor: float = bounded(0.04, above=0, at_most=1)
    end_factor: float = bounded(1e-4, above=0, at_most=1)


@SCHEDULES.register("constant")
def constant(options: NoOptions, optimizer: Optimizer, steps: int) -> LRScheduler:
    """Constant learning rate, as in the articles."""
    return ConstantLR(optimizer, factor=1.0)


@SCHEDULES.register("one_cycle", OneCycleOptions)
def one_cycle(options: OneCycleOptions, optimizer: Optimizer, steps: int) -> LRScheduler:
    """Cosine warm-up to the optimizer's learning rate and cosine decay (Smith, Topin, arXiv:1708.07120).

    A pure function of the step; torch's `OneCycleLR` divides by zero where the warm-up is a single step.
    """
    warmup = options.warmup * steps

    def factor(step: int) -> float:
        if step < warmup:
            return _cosine(options.start_factor, 1.0, step / warmup)
        return _cosine(1.0, options.end_factor, (step - warmup) / (steps - warmup))

    return LambdaLR(optimizer, factor)


def _cosine(begin: float, end: float, progress: float) -> float:
    return end + (begin - end) * (1 + math.cos(math.pi * progress)) / 2
