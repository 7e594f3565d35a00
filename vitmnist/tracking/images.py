"""Images for TensorBoard and `evaluate --grid`: the model's input, its worst mistakes, the confusion matrix."""

from __future__ import annotations

import math

import torch
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor
from torchvision.utils import make_grid

from vitmnist.data.datasets import Split
from vitmnist.data.image_io import printable
from vitmnist.data.loaders import Loader
from vitmnist.data.preprocess import Preprocess
from vitmnist.training.metrics import Predictions

GRID_IMAGES = 64
MISTAKES = 16
COLUMNS = 4
CAPTION_WIDTH = 28  # characters per line
MAX_NAMED_CLASSES = 20
literal_text = rc_context({"text.parse_math": False})  # a `$` in a file or class name is no formula


def training_batch(train: Split, loader: Loader, preprocess: Preprocess, epoch: int) -> Tensor:
    """The first images of an epoch as the model saw them, augmented: float `[3, H, W]`, 0 to 1, on the CPU.

    They are read by their indices; the loader's own iteration is not disturbed.
    """
    indices = loader.sampler.indices(epoch)[: min(GRID_IMAGES, loader.sampler.batch_size)]
    keys = next(preprocess.keys(loader.sampler, epoch))
    images = train.images[indices].to(preprocess.mean.device)
    with torch.inference_mode():
        inputs = preprocess(images, None if keys is None else keys[:GRID_IMAGES])
        grid: Tensor = make_grid((inputs * preprocess.std + preprocess.mean).clamp(0, 1), nrow=8)
    return grid.cpu()


@literal_text
def worst_mistakes(test: Split, predictions: Predictions) -> Figure | None:
    """The misclassified images with the highest confidence, captioned; None if every prediction is correct."""
    worst = predictions.mistakes(test.labels)[:MISTAKES]
    if not worst:
        return None
    rows = math.ceil(len(worst) / COLUMNS)
    figure = _figure(8, 2.4 * rows)
    axes = figure.subplots(rows, COLUMNS, squeeze=False).ravel()
    for axis in axes:
        axis.axis("off")
    for axis, index in zip(axes, worst, strict=False):
        axis.imshow(test.images[index].permute(1, 2, 0).squeeze(-1).numpy(), cmap="gray", vmin=0, vmax=255)
        actual, predicted = (test.classes[int(labels[index])] for labels in (test.labels, predictions.labels))
        confidence = f"{100 * float(predictions.confidence[index]):.1f}%"
        lines = (printable(str(test.name(index))), f"true: {actual}", f"predicted: {predicted}, {confidence}")
        axis.set_title("\n".join(map(_shorten, lines)), fontsize=8)
    return figure


@literal_text
def confusion_matrix(test: Split, predictions: Predictions) -> Figure:
    """Counts of images by true (rows) and predicted class (columns), coloured by their share of the row."""
    counts = predictions.confusion_matrix(test.labels, len(test.classes))
    shares = counts / counts.sum(dim=1, keepdim=True).clamp(min=1)
    figure = _figure(7, 6.4)
    axis = figure.subplots()
    axis.imshow(shares.numpy(), cmap="Blues", vmin=0, vmax=1)
    axis.set_xlabel("predicted class")
    axis.set_ylabel("true class")
    if len(test.classes) <= MAX_NAMED_CLASSES:
        axis.set_xticks(range(len(test.classes)), test.classes, rotation=45, ha="right", fontsize=8)
        axis.set_yticks(range(len(test.classes)), test.classes, fontsize=8)
        for row, column in counts.nonzero().tolist():
            colour = "white" if shares[row, column] > 0.5 else "black"
            axis.text(column, row, f"{counts[row, column]:,}", ha="center", va="center", color=colour, fontsize=8)
    return figure


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)  # without pyplot, whose figures stay in memory until they are closed
    return figure


def _shorten(line: str) -> str:
    """Remove the middle of a long line: file names differ at their ends."""
    half = CAPTION_WIDTH // 2
    return line if len(line) <= CAPTION_WIDTH else f"{line[:half]}…{line[-half:]}"
