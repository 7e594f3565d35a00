"""The images that TensorBoard and `evaluate --grid` show."""

import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.conftest import CallHere, Printed, result_of
from tests.support.outputs import events
from vitmnist.augment.preprocess import Compose, Preprocess
from vitmnist.cli.evaluate import main as evaluate
from vitmnist.data.datasets.base import Dataset, ImageFiles
from vitmnist.data.sampler import EpochSampler
from vitmnist.loaders.base import LOADERS
from vitmnist.tracking import pictures
from vitmnist.training.loop import Predictions


@pytest.mark.parametrize(
    ("shuffle", "operations"), [("sample", []), ("batch", []), ("none", []), ("sample", [{"name": "cutmix"}])]
)
def test_the_training_batch_is_the_one_that_was_trained_on(tiny: Dataset, shuffle: str, operations: list) -> None:
    sampler, preprocess = EpochSampler(23, 10, 3, shuffle), Preprocess(tiny.train, Compose(operations))
    with LOADERS.build({"name": "ram"}, tiny.train, sampler, torch.device("cpu")) as loader:
        grid = np.asarray(pictures.draw_training_batch(tiny.train, loader.sampler, preprocess, 1))
        batch, keys = next(zip(loader.epoch(1), preprocess.random_keys(sampler, 1), strict=False))
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
    assert pictures.draw_worst_mistakes(tiny.test, Predictions(actual, confidence, actual, 10)) is None
    predicted = actual.clone()
    predicted[[1, 4]] = (actual[[1, 4]] + 1) % 10
    predictions = Predictions(predicted, confidence, actual, 10)
    picture = np.asarray(pictures.draw_worst_mistakes(tiny.test, predictions))[pictures.GAP // 2 :, pictures.GAP // 2 :]
    for tile, index in enumerate((4, 1)):
        enlarged = Image.fromarray(tiny.test.images[index, 0].numpy()).resize((180, 180), Image.Resampling.NEAREST)
        left, top = tile * (pictures.TILE_WIDTH + pictures.GAP), pictures.CAPTION_HEIGHT
        assert (picture[top : top + 180, left : left + 180, 0] == np.asarray(enlarged)).all()
        assert (picture[:top, left : left + 180] < 128).any(), "a caption"
    names = [f"{'a' * 90}/{index}.png" for index in range(len(actual))]
    named = replace(tiny.test, files=ImageFiles(Path(), names, Image.open))
    name, *shown = pictures.format_caption(named, predictions, 4).split("\n")
    confident = f"confidence: {100 * confidence[4]:.1f}%"
    assert shown == [f"true: {classes[actual[4]]}", f"predicted: {classes[predicted[4]]}", confident]
    assert name == f"{'a' * 18}/4.png"


@pytest.mark.parametrize("count", [3, 30, 31, 1000])
def test_a_confusion_matrix_shows_shares_of_rows_and_up_to_30_classes_counts(count: int) -> None:
    matrix = torch.zeros(count, count, dtype=torch.int64)
    matrix[0, 0], matrix[0, 1], matrix[1, 1] = 3, 1, 7
    picture = pictures.draw_confusion(matrix, [f"class {number}" for number in range(count)])
    pixels = np.asarray(picture)
    cell, margin = (pictures.CELL, pictures.MARGIN) if count <= 30 else (picture.width // count, 0)
    assert picture.size == (margin + count * cell,) * 2
    corners = pixels[margin::cell, margin::cell][:3, :3, 0]
    assert corners.tolist() == [[70, 193, 255], [255, 8, 255], [255, 255, 255]]
    if count <= 30:
        for row, column in ((-1, 0), (0, -1), (0, 0), (0, 1)):
            top, left = max(margin + row * cell, 0), max(margin + column * cell, 0)
            tile = pixels[top : top + cell, left : left + cell, 0]
            assert len(np.unique(tile)) > 2, "text: a name left and above, and counts"
        assert len(np.unique(pixels[margin + 2 * cell :, margin:])) == 1, "a class without images"


def test_the_confusion_matrix_and_the_metrics_of_each_class_are_those_of_evaluate_after_the_last_epoch(
    quick: list[str], succeed: Printed, call_here: CallHere, tmp_path: Path
) -> None:
    succeed(*quick, "log.per_class=true", "log.images_every_epochs=5", "hydra.run.dir=run")
    evaluated = json.loads(call_here(evaluate, "run", "--json", "--confusion", "matrix.png").stdout)["classes"]
    shown, recorded = events(tmp_path / "run"), result_of(tmp_path / "run")["epochs"][-1]["classes"]
    (image,) = shown.Images("visuals/confusion_matrix")
    logged, written = Image.open(io.BytesIO(image.encoded_image_string)), Image.open(tmp_path / "matrix.png")
    assert (image.step, np.asarray(logged).tobytes()) == (2, np.asarray(written).tobytes())
    assert recorded == {row["class"]: {name: row[name] for name in ("precision", "recall", "f1")} for row in evaluated}
    for label, values in recorded.items():
        for name, value in values.items():
            assert (f"verbose_{name}/{label}" in shown.Tags()["scalars"]) >= (value is not None)
    assert "completed, epoch 2/2" in succeed("resume=run", "log.per_class=false")
