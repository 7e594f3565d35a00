"""The images that TensorBoard and `evaluate --grid` show."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from vitmnist.data.datasets.base import Dataset, ImageFiles
from vitmnist.tracking.images import CAPTION_HEIGHT, GAP, TILE_WIDTH, draw_worst_mistakes, format_caption
from vitmnist.training.loop import Predictions


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
