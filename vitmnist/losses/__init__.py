"""The registry of losses. Each module in this folder registers a loss."""

from collections.abc import Callable

import torch
from torch import Tensor

from vitmnist.registry import ConfigGroup

Loss = Callable[[Tensor, Tensor], Tensor]
"""Computes the sum of the loss over the images, a scalar tensor, from float32 logits `[B, classes]` and targets.

Targets are int64 labels `[B]`, or float32 class probabilities `[B, classes]` if images are mixed. A label of -100 or a
row of zeros is padding and has a loss of 0. The step divides the sum by the global batch size, so that neither
microbatches nor ranks change the gradient. A loss with a state is a module with buffers, which checkpoints save.
"""

LOSSES = ConfigGroup[object, [Tensor, tuple[str, ...], torch.device], Loss]("loss", __package__)
"""Built with (options, labels of the training split, names of the classes, device of the run)."""
