"""Draws images for loggers and `evaluate --grid`: inputs of the model, and its worst mistakes.

Pillow draws them, because importing matplotlib or torchvision takes longer than training on a small dataset.
"""

import math
from collections.abc import Sequence

import torch
from PIL import Image, ImageDraw, ImageOps
from torch import Tensor

from vitmnist.augment.preprocess import Preprocess
from vitmnist.data.datasets.base import Dataset, Split
from vitmnist.data.sampler import EpochSampler
from vitmnist.errors import escape_unprintable
from vitmnist.training.loop import Predictions

BATCH_IMAGES, MISTAKES = 64, 16
"""The maximum numbers of training images and of mistakes in an image."""
TILE_WIDTH, CAPTION_HEIGHT, GAP = 180, 64, 10
"""The layout of the mistakes, in pixels."""
CAPTION_LENGTH = 24
"""The number of characters that fit in the width of a tile."""
LABELLED_CLASSES, CELL, MARGIN, FONT_SIZE = 30, 44, 130, 14
"""The layout of a confusion matrix: the maximum number of classes with text, and sizes in pixels."""


def draw_epoch_images(
    dataset: Dataset, sampler: EpochSampler, preprocess: Preprocess, predictions: Predictions, epoch: int
) -> dict[str, Image.Image]:
    """Draw inputs of an epoch, and the confusion matrix and the worst mistakes after it; return the images by name."""
    images = {"training_batch": draw_training_batch(dataset.train, sampler, preprocess, epoch)}
    classes = dataset.eval_split.classes
    images["confusion_matrix"] = draw_confusion(predictions.confusion_matrix(), classes)
    if mistakes := draw_worst_mistakes(dataset.eval_split, predictions):
        images["worst_mistakes"] = mistakes
    return images


def draw_training_batch(train: Split, sampler: EpochSampler, preprocess: Preprocess, epoch: int) -> Image.Image:
    """Draw the first images of an epoch as the model saw them, augmented.

    The images are read by index, because another pass over the loader would disturb its iteration.
    """
    size = sampler.rank_batch_size if preprocess.has_mixing else min(BATCH_IMAGES, sampler.rank_batch_size)
    indices = sampler.sample_ids(epoch)[:size] % sampler.size
    keys = next(preprocess.random_keys(sampler, epoch))
    images = train.images[indices].to(preprocess.mean.device)
    with torch.inference_mode():
        if preprocess.has_mixing and keys is not None:
            inputs, _ = preprocess.mix_batch(images, train.labels[indices].to(images.device), keys)
        else:
            inputs = preprocess(images, None if keys is None else keys[:size])
        pixels = (inputs * preprocess.std + preprocess.mean).clamp(0, 1).mul(255).round().byte().cpu()
    return _draw_grid([_to_image(image) for image in pixels[:BATCH_IMAGES]], columns=8, gap=2, background="black")


def draw_worst_mistakes(split: Split, predictions: Predictions) -> Image.Image | None:
    """Draw the mistakes with the highest confidence, with captions; None if there are none."""
    tiles = []
    for index in predictions.mistakes()[:MISTAKES]:
        tile = Image.new("RGB", (TILE_WIDTH, CAPTION_HEIGHT + TILE_WIDTH), "white")
        ImageDraw.Draw(tile).text((0, 0), format_caption(split, predictions, index), "black")
        enlarged = ImageOps.contain(_to_image(split.images[index]), (TILE_WIDTH,) * 2, Image.Resampling.NEAREST)
        tile.paste(enlarged, (0, CAPTION_HEIGHT))
        tiles.append(tile)
    return _draw_grid(tiles, columns=4, gap=GAP, background="white") if tiles else None


def draw_confusion(matrix: Tensor, classes: Sequence[str]) -> Image.Image:
    """Draw a confusion matrix, int64 `[classes, classes]`: a row for each true class, a column for each prediction.

    A larger share of the row is a darker cell. With up to `LABELLED_CLASSES` classes, cells also have their counts.
    """
    size, has_text = len(classes), len(classes) <= LABELLED_CLASSES
    shares = matrix / matrix.sum(dim=1, keepdim=True).clamp(min=1)
    pixels = torch.stack([255 - shares * (255 - channel) for channel in (8, 81, 156)]).round().byte()
    side = size * (CELL if has_text else math.ceil(640 / size))
    cells = _to_image(pixels).resize((side, side), Image.Resampling.NEAREST)
    if not has_text:
        return cells
    picture = Image.new("RGB", (MARGIN + side, MARGIN + side), "white")
    rows, columns = (Image.new("RGB", (MARGIN, side), "white") for _ in range(2))
    pen = ImageDraw.Draw(cells)
    for row, column in matrix.nonzero().tolist():
        center, color = ((column + 0.5) * CELL, (row + 0.5) * CELL), "white" if shares[row, column] > 0.5 else "black"
        pen.text(center, str(int(matrix[row, column])), color, anchor="mm", font_size=FONT_SIZE - 2)
    for index, name in enumerate(classes):
        label = escape_unprintable(name)[:15]
        for strip, x, anchor in ((rows, MARGIN - 6, "rm"), (columns, 6, "lm")):
            ImageDraw.Draw(strip).text((x, (index + 0.5) * CELL), label, "black", anchor=anchor, font_size=FONT_SIZE)
    picture.paste(cells, (MARGIN, MARGIN))
    picture.paste(rows, (0, MARGIN))
    picture.paste(columns.transpose(Image.Transpose.ROTATE_90), (MARGIN, 0))
    ImageDraw.Draw(picture).text((9, 9), "rows: true\ncolumns: predicted", "gray", font_size=FONT_SIZE - 2)
    return picture


def format_caption(split: Split, predictions: Predictions, index: int) -> str:
    """Format the file name or index, the true class, the predicted class, and its probability in four lines."""
    name = str(split.sample_name(index))[-CAPTION_LENGTH:]  # File names differ at their ends.
    actual = split.classes[int(split.labels[index])]
    predicted = split.classes[int(predictions.predicted[index])]
    lines = (name, f"true: {actual}", f"predicted: {predicted}", f"confidence: {predictions.confidence[index]:.1%}")
    return "\n".join(escape_unprintable(line)[:CAPTION_LENGTH] for line in lines)


def _draw_grid(tiles: Sequence[Image.Image], columns: int, gap: int, background: str) -> Image.Image:
    """Draw images of one size in rows, `gap` pixels apart."""
    width, height = tiles[0].width + gap, tiles[0].height + gap
    grid = Image.new("RGB", (columns * width, math.ceil(len(tiles) / columns) * height), background)
    for position, tile in enumerate(tiles):
        row, column = divmod(position, columns)
        grid.paste(tile, (column * width + gap // 2, row * height + gap // 2))
    return grid


def _to_image(pixels: Tensor) -> Image.Image:
    """Convert uint8 `[C, H, W]` to RGB: the first three channels, or the first one as grey."""
    channels = pixels[:3] if len(pixels) >= 3 else pixels[:1].expand(3, -1, -1)
    return Image.fromarray(channels.permute(1, 2, 0).contiguous().numpy())
