"""Images for loggers and `evaluate --grid`: the model's input, and its worst mistakes.

Drawn with Pillow, because importing matplotlib takes longer than training on a small set.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from PIL import Image, ImageDraw, ImageOps
from torch import Tensor

from vitmnist.augment.preprocess import Preprocess
from vitmnist.data.datasets.base import Dataset, Split
from vitmnist.data.sampler import EpochSampler
from vitmnist.errors import printable
from vitmnist.training.predictions import Predictions

GRID_IMAGES = 64
GRID_COLUMNS = 8
MISTAKES = 16
MISTAKE_COLUMNS = 4
TILE_WIDTH, CAPTION_HEIGHT, GAP = 180, 50, 10  # All are in pixels.
CAPTION_LETTERS = 24  # So many letters fit the width of a tile.


def draw_epoch_images(
    dataset: Dataset, sampler: EpochSampler, preprocess: Preprocess, predictions: Predictions, epoch: int
) -> dict[str, Image.Image]:
    """The model's input in an epoch and its worst mistakes after it, by name, for loggers."""
    drawn = {
        "training_batch": draw_training_batch(dataset.train, sampler, preprocess, epoch),
        "worst_mistakes": draw_worst_mistakes(dataset.evaluated, predictions),
    }
    return {name: picture for name, picture in drawn.items() if picture is not None}


def draw_training_batch(train: Split, sampler: EpochSampler, preprocess: Preprocess, epoch: int) -> Image.Image:
    """The first images of an epoch as the model saw them, augmented.

    They are read by their indices; the loader's own iteration is not disturbed.
    """
    size = sampler.rank_batch_size if preprocess.mixes else min(GRID_IMAGES, sampler.rank_batch_size)
    indices = sampler.indices(epoch)[:size]
    keys = next(preprocess.keys(sampler, epoch))
    images = train.images[indices].to(preprocess.mean.device)
    with torch.inference_mode():
        if preprocess.mixes and keys is not None:
            inputs, _ = preprocess.mix_batch(images, train.labels[indices].to(images.device), keys)
        else:
            inputs = preprocess(images, None if keys is None else keys[:size])
        pixels = (inputs * preprocess.std + preprocess.mean).clamp(0, 1).mul(255).round().byte().cpu()
    return draw_grid([_to_image(image) for image in pixels[:GRID_IMAGES]], GRID_COLUMNS, gap=2)


def draw_worst_mistakes(split: Split, predictions: Predictions) -> Image.Image | None:
    """The misclassified images with the highest confidence, captioned; None if every prediction is correct."""
    tiles = []
    for index in predictions.mistakes()[:MISTAKES]:
        tile = Image.new("RGB", (TILE_WIDTH, CAPTION_HEIGHT + TILE_WIDTH), "white")
        ImageDraw.Draw(tile).text((0, 0), format_caption(split, predictions, index), "black")
        enlarged = ImageOps.contain(_to_image(split.images[index]), (TILE_WIDTH,) * 2, Image.Resampling.NEAREST)
        tile.paste(enlarged, (0, CAPTION_HEIGHT))
        tiles.append(tile)
    return draw_grid(tiles, MISTAKE_COLUMNS, GAP, "white") if tiles else None


def draw_grid(tiles: Sequence[Image.Image], columns: int, gap: int, background: str = "black") -> Image.Image:
    """Images of one size in rows, `gap` pixels apart."""
    width, height = (side + gap for side in tiles[0].size)
    canvas = Image.new("RGB", (columns * width, math.ceil(len(tiles) / columns) * height), background)
    for position, tile in enumerate(tiles):
        row, column = divmod(position, columns)
        canvas.paste(tile, (column * width + gap // 2, row * height + gap // 2))
    return canvas


def format_caption(split: Split, predictions: Predictions, index: int) -> str:
    """File name or index, true class, and predicted class with its probability: three lines."""
    # File names differ at their ends.
    name = str(split.name(index))[-CAPTION_LETTERS:]
    actual = split.classes[int(split.labels[index])]
    predicted = split.classes[int(predictions.labels[index])]
    confidence = 100 * float(predictions.confidence[index])
    lines = (name, f"true: {actual}", f"{confidence:.1f}% {predicted}")
    return "\n".join(printable(line)[:CAPTION_LETTERS] for line in lines)


def _to_image(pixels: Tensor) -> Image.Image:
    """Convert uint8 `[C, H, W]` on the CPU to mode RGB: the first three channels, or the first one as grey."""
    shown = pixels[:3] if len(pixels) >= 3 else pixels[:1].expand(3, -1, -1)
    return Image.fromarray(shown.permute(1, 2, 0).contiguous().numpy())
