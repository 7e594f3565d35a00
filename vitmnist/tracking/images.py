"""Images for loggers and `evaluate --grid`: the model's input, and its worst mistakes.

Drawn with Pillow, because importing matplotlib takes longer than training on a small set.
"""

from __future__ import annotations

import math

import torch
from PIL import Image, ImageDraw, ImageOps
from torch import Tensor

from vitmnist.augment.preprocess import Preprocess
from vitmnist.data.datasets.base import Dataset, Split
from vitmnist.errors import printable
from vitmnist.loaders.base import Loader
from vitmnist.training.loop import Predictions

GRID_IMAGES = 64
GRID_COLUMNS = 8
MISTAKES = 16
MISTAKE_COLUMNS = 4
TILE_WIDTH, CAPTION_HEIGHT, GAP = 180, 50, 10  # All are in pixels.
CAPTION_LETTERS = 24  # So many letters fit the width of a tile.


def epoch_images(
    dataset: Dataset, loader: Loader, preprocess: Preprocess, predictions: Predictions, epoch: int
) -> dict[str, Image.Image]:
    """The model's input in an epoch and its worst mistakes after it, by name, for loggers."""
    drawn = {
        "training_batch": training_batch(dataset.train, loader, preprocess, epoch),
        "worst_mistakes": worst_mistakes(dataset.evaluated, predictions),
    }
    return {name: picture for name, picture in drawn.items() if picture is not None}


def training_batch(train: Split, loader: Loader, preprocess: Preprocess, epoch: int) -> Image.Image:
    """The first images of an epoch as the model saw them, augmented.

    They are read by their indices; the loader's own iteration is not disturbed.
    """
    size = loader.sampler.batch_size if preprocess.mixes else min(GRID_IMAGES, loader.sampler.batch_size)
    indices = loader.sampler.indices(epoch)[:size]
    keys = next(preprocess.keys(loader.sampler, epoch))
    return grid(model_inputs(train, indices, preprocess, None if keys is None else keys[:size])[:GRID_IMAGES])


def model_inputs(split: Split, indices: Tensor, preprocess: Preprocess, keys: Tensor | None) -> Tensor:
    """What the model sees of a batch of images, as uint8 pixels `[B, C, H, W]`; augmented if it has keys."""
    images = split.images[indices].to(preprocess.mean.device)
    with torch.inference_mode():
        if preprocess.mixes and keys is not None:
            inputs, _ = preprocess.mixed(images, split.labels[indices].to(images.device), keys)
        else:
            inputs = preprocess(images, keys)
        return (inputs * preprocess.std + preprocess.mean).clamp(0, 1).mul(255).round().byte().cpu()


def grid(pixels: Tensor) -> Image.Image:
    """Images `[B, C, H, W]` in rows of eight, with a margin of one pixel."""
    _, _, height, width = pixels.shape
    rows = math.ceil(len(pixels) / GRID_COLUMNS)
    canvas = Image.new("RGB", (GRID_COLUMNS * (width + 2), rows * (height + 2)))
    for tile, image in enumerate(pixels):
        row, column = divmod(tile, GRID_COLUMNS)
        canvas.paste(_to_image(image), (column * (width + 2) + 1, row * (height + 2) + 1))
    return canvas


def worst_mistakes(split: Split, predictions: Predictions) -> Image.Image | None:
    """The misclassified images with the highest confidence, captioned; None if every prediction is correct."""
    worst = predictions.mistakes()[:MISTAKES]
    if not worst:
        return None
    tile_height = TILE_WIDTH + CAPTION_HEIGHT
    rows = math.ceil(len(worst) / MISTAKE_COLUMNS)
    canvas = Image.new("RGB", (MISTAKE_COLUMNS * (TILE_WIDTH + GAP), rows * (tile_height + GAP)), "white")
    draw = ImageDraw.Draw(canvas)
    for tile, index in enumerate(worst):
        row, column = divmod(tile, MISTAKE_COLUMNS)
        x, y = column * (TILE_WIDTH + GAP), row * (tile_height + GAP)
        draw.text((x, y), caption(split, predictions, index), "black")
        image = _to_image(split.images[index])
        canvas.paste(
            ImageOps.contain(image, (TILE_WIDTH, TILE_WIDTH), Image.Resampling.NEAREST), (x, y + CAPTION_HEIGHT)
        )
    return canvas


def caption(split: Split, predictions: Predictions, index: int) -> str:
    """File name or index, true class, and predicted class with its probability: three lines."""
    actual, predicted = (split.classes[int(labels[index])] for labels in (split.labels, predictions.labels))
    confidence = f"{100 * float(predictions.confidence[index]):.1f}%"
    # File names differ at their ends.
    lines = (str(split.name(index))[-CAPTION_LETTERS:], f"true: {actual}", f"{confidence} {predicted}")
    return "\n".join(printable(line)[:CAPTION_LETTERS] for line in lines)


def _to_image(pixels: Tensor) -> Image.Image:
    """A uint8 image `[C, H, W]` on the CPU as one of mode RGB: its first three channels, or the first of fewer."""
    shown = pixels[:3] if len(pixels) >= 3 else pixels[:1].expand(3, -1, -1)
    return Image.fromarray(shown.permute(1, 2, 0).contiguous().numpy())
