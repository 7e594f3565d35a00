"""Draws the worst mistakes of a model, for loggers and `evaluate --grid`.

Pillow draws them, because importing matplotlib or torchvision takes longer than training on a small dataset.
"""

import math
from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageOps
from torch import Tensor

from vitmnist.data.datasets.base import Split
from vitmnist.errors import escape_unprintable
from vitmnist.training.loop import Predictions

MISTAKES, COLUMNS = 16, 4
"""The largest number of mistakes to draw, and of mistakes in a row."""
TILE_WIDTH, CAPTION_HEIGHT, GAP = 180, 50, 10
"""The layout of a mistake, in pixels."""
CAPTION_LENGTH = 24
"""The number of characters that fit in the width of a tile."""


def draw_worst_mistakes(split: Split, predictions: Predictions) -> Image.Image | None:
    """Draw the mistakes with the highest confidence, with captions; None if there are none."""
    tiles = []
    for index in predictions.mistakes()[:MISTAKES]:
        tile = Image.new("RGB", (TILE_WIDTH, CAPTION_HEIGHT + TILE_WIDTH), "white")
        ImageDraw.Draw(tile).text((0, 0), format_caption(split, predictions, index), "black")
        enlarged = ImageOps.contain(_to_image(split.images[index]), (TILE_WIDTH,) * 2, Image.Resampling.NEAREST)
        tile.paste(enlarged, (0, CAPTION_HEIGHT))
        tiles.append(tile)
    return _draw_grid(tiles) if tiles else None


def format_caption(split: Split, predictions: Predictions, index: int) -> str:
    """Format the file name or index, the true class, and the predicted class with its probability, in three lines."""
    name = str(split.name(index))[-CAPTION_LENGTH:]  # File names differ at their ends.
    actual = split.classes[int(split.labels[index])]
    predicted = split.classes[int(predictions.predicted[index])]
    confidence = 100 * float(predictions.confidence[index])
    lines = (name, f"true: {actual}", f"{confidence:.1f}% {predicted}")
    return "\n".join(escape_unprintable(line)[:CAPTION_LENGTH] for line in lines)


def _draw_grid(tiles: Sequence[Image.Image]) -> Image.Image:
    """Draw images of one size in rows of `COLUMNS`, `GAP` pixels apart."""
    width, height = tiles[0].width + GAP, tiles[0].height + GAP
    grid = Image.new("RGB", (COLUMNS * width, math.ceil(len(tiles) / COLUMNS) * height), "white")
    for position, tile in enumerate(tiles):
        row, column = divmod(position, COLUMNS)
        grid.paste(tile, (column * width + GAP // 2, row * height + GAP // 2))
    return grid


def _to_image(pixels: Tensor) -> Image.Image:
    """Convert uint8 `[C, H, W]` to RGB: the first three channels, or the first one as grey."""
    channels = pixels[:3] if len(pixels) >= 3 else pixels[:1].expand(3, -1, -1)
    return Image.fromarray(channels.permute(1, 2, 0).contiguous().numpy())
