"""A trained model, called with images; `load_model` loads it from the folder of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from vitmnist.augment.preprocess import Compose, Preprocess
from vitmnist.checkpoint.storage import WEIGHT_FILES, as_damaged_error, find_weights_file, read_weights_file
from vitmnist.data.datasets.base import Split, get_image_reader
from vitmnist.data.image_listing import SPLIT_OF
from vitmnist.data.images import ImageReader, Pixels, ReadImage, to_tensor
from vitmnist.errors import ConfigError, DataError, join_names, suggest_names
from vitmnist.inference.evaluation import Evaluation, load_evaluation_config, load_evaluation_dataset
from vitmnist.inference.inputs import ImageInput, convert_image, iterate_images
from vitmnist.loaders.make_loader import make_loader
from vitmnist.metrics import MetricCollection
from vitmnist.models import MODELS
from vitmnist.runtime.device import choose_device, set_float32_precision
from vitmnist.runtime.random_state import preserve_random_state
from vitmnist.training import loop
from vitmnist.training.checks import check_metric_functions

BATCH_SIZE = 256
"""The number of images in memory at a time."""
PRECISION_LOCK = Lock()
"""Several threads can call a model, but the precision of products is a setting of the process."""


@dataclass(frozen=True, repr=False)
class Prediction:
    """The most likely class of an image, its probability, and the probability of each class."""

    label: str
    probability: float
    probabilities: dict[str, float]

    def __repr__(self) -> str:
        best = sorted(self.probabilities, key=self.probabilities.__getitem__, reverse=True)[:3]
        shown = ", ".join(f"{name:.24} {100 * self.probabilities[name]:.1f}%" for name in best)
        return f"Prediction({shown})"


@dataclass(frozen=True, eq=False, repr=False)
class TrainedModel:
    """A trained model on its device, with everything needed to use it; `load_model` returns it.

    Args:
        run: the folder of the run.
        weights: the file of the weights.
        module: the network; it takes the output of `preprocess` and returns logits.
        preprocess: crops and normalises images uint8 `[B, C, H, W]`.
        classes: the names of the classes, in the order of the logits.
        image_shape: `[C, H, W]` of the images.
        dataset: the options of the dataset, without the options that may change on resuming.
    """

    run: Path
    weights: Path
    module: nn.Module
    preprocess: Preprocess
    classes: tuple[str, ...]
    image_shape: tuple[int, ...]
    dataset: Mapping[str, Any]

    @property
    def device(self) -> torch.device:
        """The device of the network."""
        return self.preprocess.mean.device

    @cached_property
    def reader(self) -> ReadImage:
        """The function that reads a file as in training; raises `ConfigError` if the dataset is unknown."""
        return get_image_reader(self.dataset, self.image_shape)

    def __call__(self, images: ImageInput | Iterable[ImageInput]) -> list[Prediction]:
        """Classify images of any size, converted as in training. Several threads can call a model.

        An array is uint8, from NumPy or torch: `[H, W]`, `[H, W, C]`, `[C, H, W]`, or `[B, …]` for several images. An
        axis of 1, 3 or 4 is the channels: grey, RGB or RGBA. In `[C, H, W]`, C is 1 or the number of channels of the
        model. `[B, H, W]` is B grey images. Arrays that can be read in two ways are refused.

        Args:
            images: a path, a PIL image, an array, or a list of these.

        Returns:
            A prediction for each image.

        Raises:
            DataError: a file is missing or damaged, or an array is ambiguous or not uint8.
        """
        inputs = iterate_images(images, self.image_shape[0])
        predictions: list[Prediction] = []
        while batch := [self.read(image) for image in islice(inputs, BATCH_SIZE)]:
            predictions += self.classify(torch.stack(batch))
        return predictions

    def read(self, image: Path | Image.Image | Pixels) -> Tensor:
        """Read a file, or convert a PIL image or an array `[H, W, C]`, to uint8 `[C, H, W]` as in training.

        Raises:
            DataError: the image is missing or damaged, or only the dataset's own reader can convert it.
        """
        channels, height, width = self.image_shape
        if isinstance(image, np.ndarray) and image.shape == (height, width, channels):
            return to_tensor(image)
        if isinstance(image, Path):
            pixels = self.reader(image)
        elif isinstance(self.reader, ImageReader):
            pixels = convert_image(self.reader, image)
        else:
            advice = f"pass paths, or uint8 arrays {list(self.image_shape)}"
            raise DataError(f"the dataset {self.dataset['name']} has its own reader of files; {advice}")
        tensor = to_tensor(pixels)
        # The reader of a custom dataset can return other shapes and dtypes.
        if (shape := tuple(tensor.shape)) != self.image_shape or tensor.dtype != torch.uint8:
            raise DataError(f"{image}: is read as {tensor.dtype} {shape}, and the model takes uint8 {self.image_shape}")
        return tensor

    def classify(self, images: Tensor) -> list[Prediction]:
        """Classify a batch of images uint8 `[B, C, H, W]` of the model's shape."""
        with torch.inference_mode(), PRECISION_LOCK, set_float32_precision():
            logits = self.module.eval()(self.preprocess(images.to(self.device)))
            rows = logits.softmax(dim=1).tolist()
        predictions = []
        for row in rows:
            probabilities = dict(zip(self.classes, row, strict=True))
            label = max(probabilities, key=probabilities.__getitem__)
            predictions.append(Prediction(label, probabilities[label], probabilities))
        return predictions

    def evaluate(self, split: str | None = None, overrides: Sequence[str] = ()) -> Evaluation:
        """Evaluate the model on a split of the run's dataset.

        Args:
            split: train, val or test; None: the split that was evaluated in training.
            overrides: changes to the configuration of the run, such as `data.dataset.path=other`.

        Raises:
            UserError: the overrides or the data cannot be used.
        """
        config = load_evaluation_config(self.run, [overrides] if isinstance(overrides, str) else overrides)
        dataset = load_evaluation_dataset(self.run, config)
        name = SPLIT_OF.get(split, split) if split else dataset.eval_split_name
        if name not in dataset.splits:
            raise ConfigError(f"split {name}: the dataset has only {' and '.join(dataset.splits)} images")
        images = self.adapt_split(dataset.splits[name])
        metrics = MetricCollection(config.metrics)
        check_metric_functions(metrics, len(self.classes))
        # All loaders deliver the same batches. `cache` reads mapped images in place, so they can be larger than memory.
        loader_name = "cache" if images.is_mapped else "ram"
        options: Any = {"seed": 0, "shuffle": "none", "rank": 0, "world_size": 1}
        with make_loader(loader_name, images, batch_size=config.batch_size, device=self.device, **options) as loader:
            evaluated = loop.evaluate(self.module, loader, self.preprocess, metrics=metrics)
        values = {metric: evaluated.metrics[f"eval_{metric}"] for metric in metrics.infos}
        split_name = name if len(dataset.splits) > 1 else "all"
        return Evaluation(self.weights, split_name, images, evaluated.predictions, values)

    def adapt_split(self, split: Split) -> Split:
        """Return the split with the channel statistics and the class indices of the model.

        Raises:
            ConfigError: the split has no images, or its images or classes do not fit the model.
        """
        if not len(split):
            raise ConfigError("the split to evaluate has no images")
        shape, classes = tuple(split.images.shape[1:]), self.classes
        if shape != self.image_shape:
            advice = f"the dataset has {list(shape)}; set data.dataset.size and data.dataset.mode of a folder"
            raise ConfigError(f"the model takes images {list(self.image_shape)}, {advice}")
        if unknown := [name for name in split.classes if name not in classes]:
            raise ConfigError(
                f"the dataset has classes that the model does not know: {join_names(unknown)}; "
                f"it knows {join_names(classes)}"
            )
        labels = torch.tensor([classes.index(name) for name in split.classes])[split.labels]
        mean, std = (tuple(values.flatten().tolist()) for values in (self.preprocess.mean, self.preprocess.std))
        return replace(split, labels=labels, classes=classes, mean=mean, std=std)


def load_model(run: str | Path, weights: str | None = None, device: str | torch.device = "auto") -> TrainedModel:
    """Load the model of a run, to classify images and to evaluate it.

    Args:
        run: the folder of the run.
        weights: best, final or last; None: the first kind that exists.
        device: auto, cpu, cuda, cuda:0, …; `auto` is the GPU if there is one.

    Raises:
        ConfigError: the folder does not contain these weights, their model cannot be built, or there is no such device.
        DataError: the weights are damaged.
    """
    if weights is not None and weights not in WEIGHT_FILES:
        raise ConfigError(f"weights={weights}: {suggest_names(weights, WEIGHT_FILES)}")
    target, folder = choose_device(str(device)), Path(run).expanduser()
    path = find_weights_file(folder, [weights] if weights else [*WEIGHT_FILES])
    with as_damaged_error(path):
        info, tensors = read_weights_file(path)
        shape, classes = tuple(map(int, info["shape"])), tuple(map(str, info["classes"]))
        mean, std = ([*map(float, info[key])] for key in ("mean", "std"))
        (height, width), dataset = map(int, info["size"]), dict(info["dataset"])
    with preserve_random_state():  # Building a model draws its initial weights.
        module = MODELS.build(info["model"], (shape[0], height, width), len(classes))
    with as_damaged_error(path):
        module.load_state_dict(tensors)
    preprocess = Preprocess(augment=Compose([], (height, width)), mean=mean, std=std)
    return TrainedModel(folder, path, module.eval().to(target), preprocess.to(target), classes, shape, dataset)
