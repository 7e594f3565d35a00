"""Losses are sums over images. Padding has no loss, and class weights follow the training split."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from vitmnist.errors import ConfigError
from vitmnist.losses import LOSSES, Loss

CPU, CLASSES = torch.device("cpu"), ("cat", "dog", "fox")
LABELS = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2])


def build(labels: Tensor = LABELS, **options: object) -> Loss:
    return LOSSES.build({"name": "cross_entropy", **options}, labels, CLASSES, CPU)


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"class_weights": [1, 2, 0.5]}], ids=str)
def test_padding_has_no_loss_as_label_and_as_probabilities(options: dict[str, object]) -> None:
    logits, labels = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 1, 1])
    padded = torch.cat([logits, torch.randn(2, 3)])
    loss, probabilities = build(**options), F.one_hot(labels, 3).float()
    expected = loss(logits, labels)
    assert torch.equal(loss(padded, F.pad(labels, [0, 2], value=-100)), expected)
    assert torch.allclose(loss(padded, F.pad(probabilities, [0, 0, 0, 2])), expected)
    assert torch.allclose(loss(logits[:2], labels[:2]) + loss(logits[2:], labels[2:]), expected)


def test_balanced_weights_are_inverse_frequencies_of_mean_one() -> None:
    logits = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    weights = torch.tensor([8 / 12, 8 / 6, 8 / 6])
    assert float(weights[LABELS].mean()) == pytest.approx(1)
    expected = (weights[LABELS] * F.cross_entropy(logits, LABELS, reduction="none")).sum()
    assert torch.allclose(build(class_weights="balanced")(logits, LABELS), expected)


@pytest.mark.parametrize("weights", ["even", [1, 2], [1, -1, 1], [0, 0, 0], [1, "a", 1], [1, float("nan"), 1], 3])
def test_weights_that_do_not_fit_are_refused(weights: object) -> None:
    with pytest.raises(ConfigError, match=r"must be (finite|null, balanced, or a list of 3 numbers, at least 0, in)"):
        build(class_weights=weights)
    with pytest.raises(ConfigError, match="class_weights=balanced: no training image is of dog"):
        build(torch.tensor([0, 2]), class_weights="balanced")
