"""The images that TensorBoard and `evaluate --grid` show."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from vitmnist.data.augment import Compose
from vitmnist.data.datasets import Dataset
from vitmnist.data.loaders import LOADERS
from vitmnist.data.preprocess import Preprocess
from vitmnist.data.sampler import EpochSampler
from vitmnist.tracking import images as drawing
from vitmnist.tracking.images import confusion_matrix, training_batch, worst_mistakes
from vitmnist.training.metrics import Predictions


@pytest.mark.parametrize(
    ("shuffle", "operations"),
    [("sample", []), ("batch", []), ("none", []), ("sample", [{"name": "cutmix"}])],  # mixed with the whole batch
)
def test_the_training_batch_is_the_one_that_was_trained_on(tiny: Dataset, shuffle: str, operations: list) -> None:
    sampler, options = EpochSampler(23, 10, 3, shuffle), LOADERS.complete({"name": "ram"})
    preprocess = Preprocess(tiny.train, Compose(operations))
    with LOADERS.build(options, tiny.train, sampler, torch.device("cpu")) as loader:
        grid = np.asarray(training_batch(tiny.train, loader, preprocess, 1))
        batch, keys = next(zip(loader.epoch(1), preprocess.keys(sampler, 1), strict=False))
    plain = Preprocess(tiny.train)(batch[0])
    seen = preprocess.mixed(*batch, keys)[0] if operations else plain
    assert torch.equal(seen, plain) == (not operations)
    assert grid.shape == (2 * 30, 8 * 30, 3)
    for place, image in enumerate(seen * preprocess.std + preprocess.mean):
        row, column = divmod(place, 8)
        shown = grid[30 * row + 1 : 30 * row + 29, 30 * column + 1 : 30 * column + 29]
        assert (shown == (255 * image[0]).round().byte().numpy()[..., None]).all()


def test_the_worst_mistakes_are_the_most_confident_ones(tiny: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    captions: list[str] = []
    make = drawing._caption
    monkeypatch.setattr(drawing, "_caption", lambda *parts: captions.append(make(*parts)) or captions[-1])
    actual, classes = tiny.test.labels, tiny.test.classes
    confidence = torch.linspace(0.2, 0.8, len(actual))
    assert worst_mistakes(tiny.test, Predictions(actual, confidence)) is None
    predicted = actual.clone()
    predicted[[1, 4]] = (actual[[1, 4]] + 1) % 10
    for files in (None, ["a" * 90 + f"/{index}.png" for index in range(len(actual))]):
        captions.clear()
        picture = np.asarray(worst_mistakes(replace(tiny.test, files=files), Predictions(predicted, confidence)))
        assert captions == [
            (f"{'a' * 13}…{'a' * 7}/{index}.png\n" if files else f"{index}\n")  # both ends of a long name
            + f"true: {classes[actual[index]]}\n"
            + f"predicted: {classes[predicted[index]]}, {100 * confidence[index]:.1f}%"
            for index in (4, 1)
        ]
        for tile, index in enumerate((4, 1)):
            enlarged = Image.fromarray(tiny.test.images[index, 0].numpy()).resize((180, 180), Image.Resampling.NEAREST)
            top = drawing.GAP + 3 * drawing.LINE + 2
            shown = picture[top : top + 180, 212 * tile + 16 : 212 * tile + 196, 0]
            assert (shown == np.asarray(enlarged)).all()


def test_the_confusion_matrix_is_coloured_by_the_share_of_each_row(tiny: Dataset) -> None:
    """Every image is predicted as the next class: dark above the diagonal, white elsewhere."""
    predictions = Predictions((tiny.test.labels + 1) % 10, torch.ones(len(tiny.test)))
    picture = np.asarray(confusion_matrix(tiny.test, predictions)).astype(int)
    cell = 44
    corner = picture.shape[0] - 8 - 10 * cell
    seen = tiny.test.labels.unique().tolist()
    for row in range(10):
        for column in range(10):
            # Next to a corner of the cell, where no number is drawn.
            pixel = picture[corner + row * cell + 3, corner + column * cell + 3]
            assert (pixel == ([8, 48, 107] if row in seen and column == (row + 1) % 10 else [255] * 3)).all()


def test_many_classes_have_no_names_and_few_pixels(tiny: Dataset) -> None:
    test = replace(tiny.test, classes=tuple(f"class {number}" for number in range(300)))
    predictions = Predictions(test.labels, torch.ones(len(test)))
    assert max(confusion_matrix(test, predictions).size) < 700
