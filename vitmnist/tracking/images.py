"""Images for TensorBoard and `evaluate --grid`: the model's input, its worst mistakes, the confusion matrix.

Drawn with Pillow, because importing matplotlib takes longer than training on a small set.
"""

from __future__ import annotations

import math
from functools import cache
from importlib.metadata import distribution

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from vitmnist.data.datasets import Split
from vitmnist.data.loaders import Loader
from vitmnist.data.preprocess import Preprocess
from vitmnist.errors import printable
from vitmnist.training.metrics import Predictions

GRID_IMAGES = 64
GRID_COLUMNS = 8
MISTAKES = 16
MISTAKE_COLUMNS = 4
MISTAKE_SIZE = 180  # pixels of the longer side
MAX_NAMED_CLASSES = 20
CELL = 44  # pixels of a cell of the confusion matrix with named classes
MATRIX_SIZE = 600  # pixels of one with more classes
FONT_SIZE = 12
LINE = FONT_SIZE + 4
GAP = 8
DARK_BLUE = (8, 48, 107)


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
    for number, image in enumerate(pixels):
        row, column = divmod(number, GRID_COLUMNS)
        canvas.paste(_to_image(image), (column * (width + 2) + 1, row * (height + 2) + 1))
    return canvas


def worst_mistakes(test: Split, predictions: Predictions) -> Image.Image | None:
    """The misclassified images with the highest confidence, captioned; None if every prediction is correct."""
    worst = predictions.mistakes(test.labels)[:MISTAKES]
    if not worst:
        return None
    _, _, height, width = test.images.shape
    scale = MISTAKE_SIZE / max(height, width)
    size = round(width * scale), round(height * scale)
    tile_width, tile_height = MISTAKE_SIZE + 4 * GAP, MISTAKE_SIZE + 3 * LINE + 2 * GAP
    canvas, draw = _canvas(MISTAKE_COLUMNS * tile_width, math.ceil(len(worst) / MISTAKE_COLUMNS) * tile_height)
    for number, index in enumerate(worst):
        row, column = divmod(number, MISTAKE_COLUMNS)
        x, y = column * tile_width, row * tile_height + GAP
        draw.text((x + tile_width / 2, y), _caption(test, predictions, index), "black", anchor="ma", align="center")
        image = _to_image(test.images[index]).resize(size, Image.Resampling.NEAREST)
        canvas.paste(image, (x + (tile_width - image.width) // 2, y + 3 * LINE + 2))
    return canvas


def confusion_matrix(test: Split, predictions: Predictions) -> Image.Image:
    """Counts of images by true (rows) and predicted class (columns), coloured by their share of the row."""
    classes = len(test.classes)
    counts = predictions.confusion_matrix(test.labels, classes)
    shares = counts / counts.sum(dim=1, keepdim=True).clamp(min=1)
    # White for 0, dark blue for 1.
    colours = 255 - shares.unsqueeze(0) * (255 - torch.tensor(DARK_BLUE)).view(3, 1, 1)
    cell = CELL if classes <= MAX_NAMED_CLASSES else max(MATRIX_SIZE // classes, 1)
    size = classes * cell
    names = [_shorten(name, MISTAKE_SIZE) for name in test.classes] if classes <= MAX_NAMED_CLASSES else []
    margin = max((round(_font().getlength(name)) for name in names), default=0) + LINE + 2 * GAP
    canvas, draw = _canvas(margin + size + GAP, margin + size + GAP)
    canvas.paste(_to_image(colours.round().byte()).resize((size, size), Image.Resampling.NEAREST), (margin, margin))
    draw.rectangle((margin - 1, margin - 1, margin + size, margin + size), outline="grey")
    upwards = ImageFont.TransposedFont(_font(), Image.Transpose.ROTATE_90)
    draw.text((margin + size / 2, GAP), "predicted class", "black", anchor="ma")
    draw.text((GAP, margin + size // 2 - 2 * LINE), "true class", "black", upwards)
    for number, name in enumerate(names):
        middle = margin + number * cell + cell // 2
        draw.text((margin - GAP, middle), name, "black", anchor="rm")
        draw.text((middle - LINE // 2, margin - GAP - _font().getlength(name)), name, "black", upwards)
        for column in counts[number].nonzero().flatten().tolist():
            colour = "white" if shares[number, column] > 0.5 else "black"
            position = (margin + column * cell + cell / 2, middle)
            draw.text(position, f"{counts[number, column]:,}", colour, anchor="mm")
    return canvas


def _caption(test: Split, predictions: Predictions, index: int) -> str:
    """File name or index, true class, and predicted class with its probability: three lines."""
    actual, predicted = (test.classes[int(labels[index])] for labels in (test.labels, predictions.labels))
    confidence = f"{100 * float(predictions.confidence[index]):.1f}%"
    lines = (str(test.name(index)), f"true: {actual}", f"predicted: {predicted}, {confidence}")
    return "\n".join(_shorten(line, MISTAKE_SIZE + 3 * GAP) for line in lines)


@cache
def _font() -> ImageFont.FreeTypeFont:
    """DejaVu Sans, which comes with matplotlib; the font of Pillow has no accented letters."""
    file = distribution("matplotlib").locate_file("matplotlib/mpl-data/fonts/ttf/DejaVuSans.ttf")
    return ImageFont.truetype(str(file), FONT_SIZE)


def _to_image(pixels: Tensor) -> Image.Image:
    """A uint8 image `[C, H, W]` on the CPU, of one or three channels, as an image of mode RGB."""
    return Image.fromarray(pixels.expand(3, -1, -1).permute(1, 2, 0).contiguous().numpy())


def _canvas(width: int, height: int) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    canvas = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(canvas)
    draw.font = _font()
    return canvas, draw


def _shorten(line: str, width: int) -> str:
    """Remove the middle of a line that is wider than this many pixels: file names differ at their ends."""
    line = shown = printable(line)
    for half in range(len(line) // 2, 0, -1):
        if _font().getlength(shown) <= width:
            break
        shown = f"{line[:half]}…{line[-half:]}"
    return shown
