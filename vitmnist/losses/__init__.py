"""The registry of losses: every module in this folder registers one."""

from collections.abc import Callable

from torch import Tensor

from vitmnist.registry import OptionsClass, Registry

Loss = Callable[[Tensor, Tensor], Tensor]
"""Computes the sum of the loss over the images, without dimensions, from logits, float32 `[B, classes]`, and targets.

Targets are labels, int64 `[B]`, or where images are mixed, probabilities, float32 `[B, classes]`. A label of -100 and a
row of zeros are padding, and have the loss 0. The step divides the sum by the size of the global batch, so that
neither microbatches nor ranks change the gradient.
"""

LOSSES: Registry[OptionsClass, Loss] = Registry("loss", __package__)
"""Built with (options, labels of the training split, names of the classes, device)."""
