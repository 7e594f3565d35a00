"""A training step: gradient, optimizer, averaged weights, schedule, and what makes it fast."""

from vitmnist.training.average import Average
from vitmnist.training.gradient import Gradient
from vitmnist.training.step import Step

__all__ = ["Average", "Gradient", "Step"]
