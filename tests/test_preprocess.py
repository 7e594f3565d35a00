"""Normalising a batch of bytes on its device gives what torchvision gives sample by sample, to the last bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from PIL import Image
from torchvision import transforms

from vitmnist.data.datasets import Dataset
from vitmnist.data.preprocess import Preprocess
from vitmnist.data.statistics import channel_statistics
from vitmnist.errors import DataError


@pytest.mark.parametrize("statistics", ["mnist", "random"])
def test_every_byte_becomes_what_torchvision_makes_of_it(tiny: Dataset, statistics: str) -> None:
    mean, std = ((0.1307,), (0.3081,)) if statistics == "mnist" else channel_statistics(tiny.train.images)
    values = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    split = replace(tiny.train, mean=mean, std=std)
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize(mean, std)])
    assert torch.equal(Preprocess(split)(values)[0], transform(Image.fromarray(values[0, 0].numpy())))


def test_float_images_pass_and_bytes_are_not_written_to(tiny: Dataset) -> None:
    preprocess = Preprocess(tiny.train)
    images = tiny.train.images.clone()
    normalised = preprocess(images)
    assert normalised.dtype == torch.float32
    assert torch.equal(images, tiny.train.images)
    assert preprocess(normalised) is normalised


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool])
def test_images_of_a_wrong_dtype_are_refused(tiny: Dataset, dtype: torch.dtype) -> None:
    with pytest.raises(DataError, match=f"images: must be uint8, or floating point and normalised, found {dtype}"):
        Preprocess(tiny.train)(tiny.train.images.to(dtype))
