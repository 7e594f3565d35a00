"""Exports a model and compares the result with the original."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from vitmnist.checkpoint.inference import InferenceModel
from vitmnist.data.datasets import Dataset
from vitmnist.data.preprocess import Preprocess
from vitmnist.errors import ExportError
from vitmnist.export.formats import Format


@dataclass(frozen=True)
class Exported:
    """An exported model that predicts the same classes as the original.

    Args:
        content: of its file.
        accuracy: of the exported model on the `test` of the dataset, in percent.
        largest_difference: between the logits of the two there, absolute.
    """

    kind: Format
    content: bytes
    trained: InferenceModel
    dataset: Dataset
    accuracy: float
    largest_difference: float

    def summary(self) -> str:
        """The result of the comparison."""
        return (
            f"{self.dataset.name}, {self.dataset.evaluated_on()}: accuracy {self.accuracy:.2f}%; same predictions as "
            f"{self.trained.path.name}, largest difference of the logits {self.largest_difference:.2g}"
        )


def export_model(kind: Format, trained: InferenceModel, dataset: Dataset, batch_size: int) -> Exported:
    """Export a model that is on the CPU, with its normalisation, and compare the two on `dataset.test`.

    Raises:
        ConfigError: the images or classes of the dataset do not fit the model.
        ExportError: the exported model predicts another class for some image.
    """
    split = trained.normalized(dataset.test)
    original = nn.Sequential(Preprocess(split), trained.model).eval()
    # Two images, because torch.export takes a batch of one for a constant.
    example = torch.zeros(2, *trained.shape, dtype=torch.uint8)
    program = torch.export.export(original, (example,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    content = kind.serialize(program)
    reloaded = kind.load(content)  # what is compared comes from the bytes of the file
    with torch.inference_mode():
        pairs = [(original(images), reloaded(images)) for images in split.images.split(batch_size)]
    expected, found = (torch.cat(logits) for logits in zip(*pairs, strict=True))
    predicted = found.argmax(dim=1)
    if differing := int((predicted != expected.argmax(dim=1)).sum()):
        raise ExportError(
            f"the exported model predicts another class than {trained.path} for {differing:,} images of {dataset.name} "
            f"({dataset.evaluated_on()}); nothing is written"
        )
    accuracy = 100 * int((predicted == split.labels).sum()) / len(split)
    return Exported(kind, content, trained, dataset, accuracy, (found - expected).abs().max().item())
