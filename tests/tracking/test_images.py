"""The images that TensorBoard and `evaluate --grid` show."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vitmnist.augment.preprocess import Compose, Preprocess
from vitmnist.data.datasets.base import Dataset, ImageFiles
from vitmnist.data.sampler import EpochSampler
from vitmnist.loaders.base import LOADERS
from vitmnist.tracking.images import (
    CAPTION_HEIGHT,
    GAP,
    TILE_WIDTH,
    draw_training_batch,
    draw_worst_mistakes,
    format_caption,
)
from vitmnist.training.loop import Predictions


@pytest.mark.parametrize(
    ("shuffle", "operations"),
    [("sample", []), ("batch", []), ("none", []), ("sample", [{"name": "cutmix"}])],
)
def test_the_training_batch_is_the_one_that_was_trained_on(tiny: Dataset, shuffle: str, operations: list) -> None:
    sampler, options = EpochSampler(23, 10, 3, shuffle), LOADERS.with_defaults({"name": "ram"})
    preprocess = Preprocess(tiny.train, Compose(operations))
    with LOADERS.build(options, tiny.train, sampler, torch.device("cpu")) as loader:
        grid = np.asarray(draw_training_batch(tiny.train, loader.sampler, preprocess, 1))
        batch, keys = next(zip(loader.epoch(1), preprocess.keys(sampler, 1), strict=False))
    plain = Preprocess(tiny.train)(batch[0])
    seen = preprocess.mix_batch(*batch, keys)[0] if operations else plain
    assert torch.equal(seen, plain) == (not operations)
    assert grid.shape == (2 * 30, 8 * 30, 3)
    for position, image in enumerate(seen * preprocess.std + preprocess.mean):
        row, column = divmod(position, 8)
        shown = grid[30 * row + 1 : 30 * row + 29, 30 * column + 1 : 30 * column + 29]
        assert (shown == (255 * image[0]).round().byte().numpy()[..., None]).all()


def test_the_worst_mistakes_are_the_most_confident_ones(tiny: Dataset) -> None:
    actual, classes = tiny.test.labels, tiny.test.classes
    confidence = torch.linspace(0.2, 0.8, len(actual))
    assert draw_worst_mistakes(tiny.test, Predictions(actual, confidence, actual)) is None
    predicted = actual.clone()
    predicted[[1, 4]] = (actual[[1, 4]] + 1) % 10
    predictions = Predictions(predicted, confidence, actual)
    picture = np.asarray(draw_worst_mistakes(tiny.test, predictions))[GAP // 2 :, GAP // 2 :]
    for tile, index in enumerate((4, 1)):
        enlarged = Image.fromarray(tiny.test.images[index, 0].numpy()).resize((180, 180), Image.Resampling.NEAREST)
        left = tile * (TILE_WIDTH + GAP)
        assert (picture[CAPTION_HEIGHT : CAPTION_HEIGHT + 180, left : left + 180, 0] == np.asarray(enlarged)).all()
        assert (picture[:CAPTION_HEIGHT, left : left + 180] < 128).any(), "a caption"
    names = [f"{'a' * 90}/{index}.png" for index in range(len(actual))]
    named = replace(tiny.test, files=ImageFiles(Path(), names, Image.open))
    name, *shown = format_caption(named, predictions, 4).split("\n")
    assert shown == [f"true: {classes[actual[4]]}", f"{100 * confidence[4]:.1f}% {classes[predicted[4]]}"]
    assert name == f"{'a' * 18}/4.png"
