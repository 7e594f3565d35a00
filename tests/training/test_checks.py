"""A loss or metric that is no sum over the images is refused when the step is built."""

import random
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.conftest import AddMembers, Printed
from vitmnist.data.datasets.base import Dataset
from vitmnist.errors import ConfigError
from vitmnist.losses import LOSSES
from vitmnist.metrics import METRICS, BatchMetricInfo
from vitmnist.registry import Member, NoOptions
from vitmnist.training.checks import check_loss


def brier(logits: Tensor, targets: Tensor) -> Tensor:
    is_class = targets[:, None] == torch.arange(logits.shape[1]) if targets.dim() == 1 else targets
    return ((logits.softmax(1) - is_class.float()) ** 2).sum()


def masked_brier(logits: Tensor, targets: Tensor) -> Tensor:
    is_image = targets >= 0 if targets.dim() == 1 else targets.any(1)
    return brier(logits[is_image], targets[is_image])


def smoothed(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets, reduction="sum", label_smoothing=0.1)


def one_hot(logits: Tensor, targets: Tensor) -> Tensor:
    return -(F.one_hot(targets, logits.shape[1]) * logits.log_softmax(1)).sum()


class Stateful(nn.Module):
    """A random loss that counts its calls."""

    calls = 0

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        return masked_brier(logits, targets) * (torch.rand(()) + random.random() + self.calls)


def per_image(logits: Tensor, targets: Tensor) -> Tensor:
    """Divides the sum by the size of the batch, with its padding."""
    return F.cross_entropy(logits, targets, reduction="sum") / len(targets)


@pytest.mark.parametrize(
    ("loss", "has_mixing", "message"),
    [
        (brier, False, "loss=custom: must be a sum over the images to which an image with the label -100"),
        (one_hot, False, r"adds 0 \(Class values must be non-negative"),
        (smoothed, True, "a row of zeros as its target"),
        (per_image, False, "must be a sum over the images"),
        (lambda x, y: masked_brier(x, y) / (y >= 0).sum().clamp(min=1), False, "must be a sum over the images"),
        (masked_brier, True, None),
        (lambda logits, targets: 0 * masked_brier(logits, targets), True, None),
        (Stateful(), True, None),
        (nn.PReLU(), False, "loss=custom: has parameters, and the optimizer trains only those of the model"),
    ],
)
def test_padding_must_not_change_a_loss_and_a_loss_has_no_parameters(
    tiny: Dataset,
    add_members: AddMembers,
    loss: Callable[[Tensor, Tensor], Tensor],
    has_mixing: bool,
    message: str | None,
) -> None:
    add_members(LOSSES, custom=Member(NoOptions, lambda *args: type(loss)() if isinstance(loss, nn.Module) else loss))
    states = torch.get_rng_state(), random.getstate()
    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        check_loss({"name": "custom"}, tiny.train, has_mixing)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]


@pytest.mark.parametrize("counts", ["mean", "padding", "each"])
def test_a_metric_that_is_no_sum_over_the_images_is_refused(
    counts: str, quick: list[str], refuse: Printed, add_members: AddMembers
) -> None:
    def compute(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        right = logits.argmax(dim=1) == labels
        return {"mean": right.float().mean(), "padding": (~right).sum(), "each": right}[counts]

    add_members(METRICS, wrong=Member(NoOptions, compute, BatchMetricInfo(unit="%", tag="wrong", direction="max")))
    assert "metrics: wrong must return the sum over the images of a batch" in refuse(*quick)
