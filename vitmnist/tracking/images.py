"""Pictures for TensorBoard: what the model is fed, what it gets wrong, and what it takes for what."""

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

SHOWN = 64
MISTAKES = 16
COLUMNS = 4
CAPTION = 28  # characters of a line
NAMED_CLASSES = 20


def training_batch(train: Split, loader: Loader, preprocess: Preprocess, epoch: int) -> Tensor:
    """The beginning of an epoch's first batch as the model saw it, augmented: float `[3, H, W]` of 0…1, on the CPU.

    Taken from the order, not from the loader, which stays as it is.
    """
    indices = loader.sampler.indices(epoch)[: min(SHOWN, loader.sampler.batch_size)]
    keys = next(preprocess.keys(loader.sampler, epoch))
    images = train.images[indices].to(preprocess.mean.device)
    with torch.inference_mode():
        seen = preprocess(images, None if keys is None else keys[:SHOWN])
        scaled = (seen * preprocess.std + preprocess.mean).clamp(0, 1)
        grid: Tensor = make_grid(scaled, nrow=8)
    return grid.cpu()


@rc_context({"text.parse_math": False})
def worst_mistakes(test: Split, predictions: Predictions) -> Figure | None:
    """The misclassified images with the highest confidence, captioned; None where every prediction is correct."""
    worst = predictions.mistakes(test.labels)[:MISTAKES]
    if not worst:
        return None
    rows = math.ceil(len(worst) / COLUMNS)
    figure = Figure(figsize=(8, 2.4 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, COLUMNS, squeeze=False).ravel()
    for axis in axes:
        axis.axis("off")
    for axis, index in zip(axes, worst, strict=False):
        axis.imshow(test.images[index].permute(1, 2, 0).squeeze(-1).numpy(), cmap="gray", vmin=0, vmax=255)
        actual, predicted = (test.classes[int(labels[index])] for labels in (test.labels, predictions.labels))
        confidence = f"{100 * float(predictions.confidence[index]):.1f}%"
        lines = (printable(str(test.name(index))), f"true: {actual}", f"predicted: {predicted}, {confidence}")
        axis.set_title("\n".join(map(_short, lines)), fontsize=8)
    return figure


def _short(line: str) -> str:
    """A line of a caption without its middle, where it is too long: names differ at their ends."""
    half = CAPTION // 2
    return line if len(line) <= CAPTION else f"{line[:half]}…{line[-half:]}"


@rc_context({"text.parse_math": False})
def confusion(test: Split, predictions: Predictions) -> Figure:
    """How many images of each class (rows) were taken for each (columns), in percent of the row, with the counts."""
    counts = predictions.confusion_matrix(test.labels, len(test.classes))
    shares = counts / counts.sum(dim=1, keepdim=True).clamp(min=1)
    figure = Figure(figsize=(7, 6.4), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    axis.imshow(shares.numpy(), cmap="Blues", vmin=0, vmax=1)
    axis.set_xlabel("taken for")
    axis.set_ylabel("is")
    if len(test.classes) <= NAMED_CLASSES:
        axis.set_xticks(range(len(test.classes)), test.classes, rotation=45, ha="right", fontsize=8)
        axis.set_yticks(range(len(test.classes)), test.classes, fontsize=8)
        for row, column in counts.nonzero().tolist():
            colour = "white" if shares[row, column] > 0.5 else "black"
            count = f"{int(counts[row, column]):,}"
            axis.text(column, row, count, ha="center", va="center", color=colour, fontsize=8)
    return figure
