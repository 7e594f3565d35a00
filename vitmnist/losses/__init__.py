"""The registry of losses: every module in this folder registers one."""

from collections.abc import Callable

from torch import Tensor

from vitmnist.registry import Registry

Loss = Callable[[Tensor, Tensor], Tensor]
"""From logits, float32 `[B, classes]`, and targets to the sum of the loss over the images, without dimensions.

Targets are labels, int64 `[B]`, or where images are mixed, probabilities, float32 `[B, classes]`. A label of -100 and a
row of zeros are padding, whose loss is 0. The step divides the sum by the images of the batch of all ranks, so that
neither microbatches nor ranks change the gradient.
"""

LOSSES: Registry[Loss] = Registry("loss", __package__)
"""Built with (options, labels of the training split, names of the classes, device)."""
