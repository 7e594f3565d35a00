"""The images that TensorBoard and `evaluate --grid` show."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from vitmnist.data.datasets import Dataset
from vitmnist.data.loaders import LOADERS
from vitmnist.data.preprocess import Preprocess
from vitmnist.data.sampler import EpochSampler
from vitmnist.tracking.images import training_batch, worst_mistakes
from vitmnist.training.metrics import Predictions


@pytest.mark.parametrize("shuffle", ["sample", "batch", "none"])
def test_the_training_batch_is_the_one_that_was_trained_on(tiny: Dataset, shuffle: str) -> None:
    sampler, options = EpochSampler(23, 6, 3, shuffle), LOADERS.complete({"name": "ram"})
    with LOADERS.build(options, tiny.train, sampler, torch.device("cpu")) as loader:
        grid = training_batch(tiny.train, loader, Preprocess(tiny.train), 1)
        images, _ = next(iter(loader.epoch(1)))
    assert grid.shape == (3, 2 + 28 + 2, 2 + 6 * 30)
    for place, image in enumerate(images):
        shown = grid[0, 2:30, 2 + 30 * place : 30 + 30 * place]
        torch.testing.assert_close(shown, image[0] / 255, atol=1e-6, rtol=0)


def test_the_worst_mistakes_are_the_most_confident_ones(tiny: Dataset) -> None:
    actual, classes = tiny.test.labels, tiny.test.classes
    confidence = torch.linspace(0.2, 0.8, len(actual))
    assert worst_mistakes(tiny.test, Predictions(actual, confidence)) is None
    predicted = actual.clone()
    predicted[[1, 4]] = (actual[[1, 4]] + 1) % 10
    for files in (None, ["a" * 90 + f"/{index}.png" for index in range(len(actual))]):
        figure = worst_mistakes(replace(tiny.test, files=files), Predictions(predicted, confidence))
        titles = [axis.get_title() for axis in figure.axes]
        assert titles[:2] == [
            f"{'a' * 14}…{'a' * 8}/{index}.png\n" * bool(files)  # both ends of a long name
            + f"{index}\n" * (not files)
            + f"true: {classes[actual[index]]}\n"
            + f"predicted: {classes[predicted[index]]}, {100 * confidence[index]:.1f}%"
            for index in (4, 1)
        ]
        assert not any(titles[2:])
