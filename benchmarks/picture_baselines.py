"""The libraries that `pictures.py` compares with this project: torchvision, FFCV, and simplejpeg with Pillow."""

import random
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Subset
from torchvision import transforms as T
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from vitmnist import Preprocess
from vitmnist.data.datasets.base import Split
from vitmnist.runtime.background_map import BackgroundMap
from vitmnist.runtime.cpu import create_decoder_context

Epoch = Callable[[int], Iterable[Any]]
"""Takes the number of an epoch, and returns its batches (images, labels)."""

WIDTH, HEIGHT, QUALITY = 500, 375, 85
BATCH_SIZE, WORKERS = 64, 2
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def files(folder: Path, *transforms: Any) -> ImageFolder:
    """Build torchvision's dataset over the same files."""
    return ImageFolder(str(folder / "train"), T.Compose([*transforms]))


def torchvision(
    folder: Path, side: int, pictures: int, workers: int = WORKERS, *, normalise: bool = True
) -> DataLoader[Any]:
    """Build a DataLoader as in torchvision's examples. If `normalise` is false, it only crops."""
    after_crop = [T.RandomHorizontalFlip(), T.ToTensor(), T.Normalize(MEAN, STD)] if normalise else [T.PILToTensor()]
    dataset = Subset(files(folder, T.RandomResizedCrop(side), *after_crop), range(pictures))
    return DataLoader(dataset, BATCH_SIZE, shuffle=True, num_workers=workers, persistent_workers=workers > 0)


def per_sample(train: Split, side: int, min_area: float = 0.08, *transforms: Any) -> Epoch:
    """Apply torchvision's transforms to decoded pictures, one by one."""
    crop = v2.RandomResizedCrop(side, (min_area, 1.0)), v2.RandomHorizontalFlip()
    transform = v2.Compose([*crop, *transforms, v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)])

    def epoch(_: int) -> Iterator[Any]:
        for indices in torch.randperm(len(train)).split(BATCH_SIZE):
            yield torch.stack([transform(train.images[index]) for index in indices.tolist()]), train.labels[indices]

    return epoch


@cache  # Compiling the code of the loader takes ten seconds.
def ffcv(
    folder: Path, root: Path, side: int, pictures: int, mode: str, normalise: bool = True, threads: int = WORKERS
) -> Epoch:
    """Build an FFCV loader, which crops, flips and normalises in threads. If `normalise` is false, it only crops.

    The first call writes FFCV's file of JPEGs or raw squares.
    """
    from ffcv import fields, loader, transforms, writer
    from ffcv.fields.decoders import IntDecoder, RandomResizedCropRGBImageDecoder

    file = root / (f"raw-{side}" if mode == "raw" else mode)
    if not file.exists():
        dataset = files(folder, *([T.Resize((side, side))] if mode == "raw" else []))
        columns = {"image": fields.RGBImageField(mode, jpeg_quality=QUALITY), "label": fields.IntField()}
        writer.DatasetWriter(str(file), columns, num_workers=WORKERS).from_indexed_dataset(dataset)
    to_floats = transforms.NormalizeImage(255 * np.array(MEAN), 255 * np.array(STD), np.float32)
    crop = [RandomResizedCropRGBImageDecoder((side, side))]
    crop += [transforms.RandomHorizontalFlip(), to_floats] if normalise else []
    pipelines = {
        "image": [*crop, transforms.ToTensor(), transforms.ToTorchImage(convert_back_int16=False)],
        "label": [IntDecoder(), transforms.ToTensor(), transforms.Squeeze()],
    }
    options = {"order": loader.OrderOption.RANDOM, "seed": 0, "drop_last": False, "indices": range(pictures)}
    batches = loader.Loader(str(file), BATCH_SIZE, threads, os_cache=True, pipelines=pipelines, **options)
    return lambda _: batches


def simplejpeg(samples: list[tuple[str, int]], side: int) -> Epoch:
    """Load batches in threads. Each picture is decoded at the smallest scale at which its crop has `side` pixels."""
    from simplejpeg import decode_jpeg

    whole, normalise = Image.new("L", (WIDTH, HEIGHT)), Preprocess(mean=MEAN, std=STD)

    def crop(path: str) -> Any:
        top, left, height, width = T.RandomResizedCrop.get_params(whole, [0.08, 1.0], [3 / 4, 4 / 3])
        min_size = {"min_height": side * HEIGHT // height, "min_width": side * WIDTH // width}
        pixels = decode_jpeg(Path(path).read_bytes(), **min_size)
        x, y = pixels.shape[1] / WIDTH, pixels.shape[0] / HEIGHT
        box = left * x, top * y, (left + width) * x, (top + height) * y
        resized = np.asarray(Image.fromarray(pixels).resize((side, side), Image.Resampling.BILINEAR, box))
        return resized[:, ::-1] if random.random() < 0.5 else resized

    def batch(indices: Tensor) -> tuple[Tensor, Any]:
        paths, labels = zip(*(samples[index] for index in indices), strict=True)
        return normalise(torch.from_numpy(np.stack([*map(crop, paths)])).permute(0, 3, 1, 2)), labels

    return lambda _: BackgroundMap(
        batch, torch.randperm(len(samples)).split(BATCH_SIZE), WORKERS, 2 * WORKERS, create_decoder_context()
    )
