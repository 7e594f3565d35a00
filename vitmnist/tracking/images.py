"""Draws the worst mistakes of a model, for loggers and `evaluate --grid`.

Pillow draws them, because importing matplotlib or torchvision takes longer than training on a small dataset.
"""

import math

from PIL import Image, ImageDraw, ImageOps

from vitmnist.data.datasets.base import Split
from vitmnist.errors import escape_unprintable
from vitmnist.training.loop import Predictions

MISTAKES, COLUMNS = 16, 4
"""The largest number of mistakes to draw, and of mistakes in a row."""
TILE_WIDTH, CAPTION_HEIGHT, GAP = 180, 50, 10
"""The layout of the mistakes, in pixels."""
CAPTION_LENGTH = 24
"""The number of characters that fit in the width of a tile."""


def draw_worst_mistakes(split: Split, predictions: Predictions) -> Image.Image | None:
    """Draw the mistakes with the highest confidence, with captions; None if there are none."""
    indices = predictions.mistakes()[:MISTAKES]
    if not indices:
        return None
    width, height = TILE_WIDTH + GAP, CAPTION_HEIGHT + TILE_WIDTH + GAP
    grid = Image.new("RGB", (COLUMNS * width, math.ceil(len(indices) / COLUMNS) * height), "white")
    for position, index in enumerate(indices):
        row, column = divmod(position, COLUMNS)
        left, top = column * width + GAP // 2, row * height + GAP // 2
        ImageDraw.Draw(grid).text((left, top), format_caption(split, predictions, index), "black")
        pixels = split.images[index]
        # Draw the first three channels as RGB, or the first channel as grey.
        channels = pixels[:3] if len(pixels) >= 3 else pixels[:1].expand(3, -1, -1)
        image = Image.fromarray(channels.permute(1, 2, 0).contiguous().numpy())
        enlarged = ImageOps.contain(image, (TILE_WIDTH,) * 2, Image.Resampling.NEAREST)
        grid.paste(enlarged, (left, top + CAPTION_HEIGHT))
    return grid


def format_caption(split: Split, predictions: Predictions, index: int) -> str:
    """Format the file name or index, the true class, and the predicted class with its probability, in three lines."""
    name = str(split.name(index))[-CAPTION_LENGTH:]  # File names differ at their ends.
    actual = split.classes[int(split.labels[index])]
    predicted = split.classes[int(predictions.predicted[index])]
    confidence = 100 * float(predictions.confidence[index])
    lines = (name, f"true: {actual}", f"{confidence:.1f}% {predicted}")
    return "\n".join(escape_unprintable(line)[:CAPTION_LENGTH] for line in lines)
