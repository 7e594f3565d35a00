"""Cross-entropy, with smoothed labels and weighted classes."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitmnist.config.validation import config_field
from vitmnist.errors import ConfigError, join_names
from vitmnist.losses import LOSSES, Loss


@dataclass
class CrossEntropyOptions:
    """See `conf/loss/cross_entropy.yaml`."""

    label_smoothing: float = config_field(0.0, at_least=0, below=1)
    class_weights: Any = None


@LOSSES.register("cross_entropy", CrossEntropyOptions)
def cross_entropy(options: CrossEntropyOptions, labels: Tensor, classes: tuple[str, ...], device: torch.device) -> Loss:
    """Cross-entropy with label smoothing (Szegedy et al., arXiv:1512.00567) and class weights; raises `ConfigError`."""
    weight = None
    if options.class_weights is not None:
        weight = compute_class_weights(options.class_weights, labels, classes).to(device)
    return partial(_cross_entropy, weight=weight, label_smoothing=options.label_smoothing)


def _cross_entropy(logits: Tensor, targets: Tensor, weight: Tensor | None, label_smoothing: float) -> Tensor:
    if targets.dim() == 1:
        return F.cross_entropy(logits, targets, weight, reduction="sum", label_smoothing=label_smoothing)
    # Label smoothing would give padding (a row of zeros) a loss above 0.
    losses = F.cross_entropy(logits, targets, weight, reduction="none", label_smoothing=label_smoothing)
    return losses.where(targets.any(dim=1), 0).sum()


def compute_class_weights(weights: object, labels: Tensor, classes: tuple[str, ...]) -> Tensor:
    """Return the weight of each class, float32 `[classes]`.

    `balanced` weights a class by its inverse frequency, scaled so that the mean over the training images is 1.
    """
    if weights == "balanced":
        counts = torch.bincount(labels, minlength=len(classes))
        if missing := [name for name, count in zip(classes, counts.tolist(), strict=True) if not count]:
            raise ConfigError(
                f"loss.class_weights=balanced: no training image is of {join_names(missing)}; set a list of "
                f"{len(classes)} weights, or null"
            )
        return len(labels) / (len(classes) * counts.float())
    values = weights if isinstance(weights, list) and len(weights) == len(classes) else []
    if not any(values) or not all(type(value) in (int, float) and 0 <= value < 1e6 for value in values):
        raise ConfigError(
            f"loss.class_weights={weights}: must be null, balanced, or a list of {len(classes)} numbers, at least 0, "
            f"in the order of the classes {join_names(classes)}"
        )
    return torch.tensor(values, dtype=torch.float32)
